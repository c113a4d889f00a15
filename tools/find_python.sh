#!/usr/bin/env bash
# Finds a Python that can build and run the package. Prints its path on stdout, and on stderr
# which one was taken and why. A candidate is run, not trusted by name: a version manager's
# shim may carry the right name and still fail.
#
# Usage: tools/find_python.sh          PYTHON=/path/to/python overrides the search.
set -uo pipefail

# Prints the real path and the version of the interpreter, or what it lacks (exit status 1).
read -r -d '' probe <<'EOF'
import os, platform, sys
version = platform.python_version()
if sys.version_info < (3, 12):
    sys.exit(f"is Python {version}, need >= 3.12")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"cannot import {error.name}; on Debian: apt-get install python3-venv")
import sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    sys.exit(f"has no {header}; on Debian: apt-get install python3-dev")
# Inside a virtual environment, the interpreter that it was made from.
print(sys._base_executable, version)
EOF

tried=()

# probe_python CANDIDATE REASON: on success prints the path and ends the script.
probe_python() {
    local path answer
    if ! path=$(command -v "$1"); then
        tried+=("$1: not found")
        return
    fi
    if answer=$("$path" -c "$probe" 2>&1 </dev/null); then
        echo "python: ${answer% *} (${answer##* }), $2" >&2
        echo "${answer% *}"
        exit 0
    fi
    tried+=("$path: $(grep -v -m 1 -E '^( |Traceback|$)' <<<"$answer")")
}

# Installations below a folder, one per line: 3.12 first, newest patch first, then later versions.
versions_in() {
    local minor
    for minor in 3.12 3.13 3.14; do
        find "$1" -mindepth 1 -maxdepth 1 \( -name "$minor.*" -o -name "cpython-$minor.*" \) \
            2>/dev/null | sort --version-sort --reverse
    done
}

if [[ -n ${PYTHON:-} ]]; then
    probe_python "$PYTHON" "as PYTHON asks"
    printf 'error: PYTHON=%s cannot be used: %s\n' "$PYTHON" "${tried[0]#*: }" >&2
    exit 1
fi

for name in python3.12 python3.13 python3; do
    probe_python "$name" "first usable on PATH"
done
pyenv_root=${PYENV_ROOT:-~/.pyenv}
uv_root=${UV_PYTHON_INSTALL_DIR:-~/.local/share/uv/python}
for root in "$pyenv_root/versions" "$uv_root"; do
    while IFS= read -r folder; do
        probe_python "$folder/bin/python3" "newest usable under $root"
    done < <(versions_in "$root")
done
for name in {/usr/local/bin,/usr/bin}/{python3.12,python3.13,python3.14,python3}; do
    probe_python "$name" "found outside PATH"
done

{
    echo "error: no Python >= 3.12 with venv, ensurepip and headers was found. Tried:"
    printf '  %s\n' "${tried[@]}"
    echo "Install one (Debian: apt-get install python3.12-venv python3.12-dev; anywhere: pyenv"
    echo "install 3.12, or uv python install 3.12), or name it: make test PYTHON=/path/to/python3.12"
} >&2
exit 1
