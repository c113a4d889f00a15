#!/usr/bin/env bash
# Makes .venv with everything the build, the tests and the examples need. A second call with the same
# pyproject.toml, constraints, interpreter and folder returns at once.
#
# Usage: tools/make_venv.sh            PYTHON=/path/to/python picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

venv_python=.venv/bin/python
key_file=.venv/requirements.key

# Changes whenever the environment must be brought up to date. Empty when .venv cannot run.
environment_key() {
    { "$venv_python" -c 'import sys; print(sys.version_info >= (3, 12) and sys.version, sys.prefix)' &&
        cat pyproject.toml tools/constraints.txt; } 2>/dev/null | sha256sum
}

# The build requirements, the dependencies and the dev extra, one per line.
list_requirements() {
    "$venv_python" - <<'EOF'
import tomllib

with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
project = config["project"]
groups = (
    config["build-system"]["requires"],
    project["dependencies"],
    project["optional-dependencies"]["dev"],
)
print(*(requirement for group in groups for requirement in group), sep="\n")
EOF
}

is_usable() {
    "$venv_python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

# The installation that an interpreter belongs to.
base_of() {
    "$1" -c 'import sys; print(sys.base_prefix)'
}

if [[ -n ${PYTHON:-} ]]; then
    wanted=$(tools/find_python.sh)
    current=$(base_of "$venv_python" 2>/dev/null || true)
    if [[ -n $current && $current != "$(base_of "$wanted")" ]]; then
        echo "venv: .venv runs another Python; making it anew" >&2
        rm -rf .venv
    fi
fi
if ! is_usable; then
    python=${wanted:-$(tools/find_python.sh)}
    "$python" -m venv --clear .venv
fi

key=$(environment_key)
if [[ -f $key_file && $(<"$key_file") == "$key" ]]; then
    exit 0
fi
echo "venv: installing requirements into .venv; torch with CUDA is some gigabytes, so the first" \
    "time takes minutes" >&2
list_requirements >.venv/requirements.txt
"$venv_python" -m pip install --quiet --no-input --disable-pip-version-check \
    --constraint tools/constraints.txt --requirement .venv/requirements.txt
echo "$key" >"$key_file"
