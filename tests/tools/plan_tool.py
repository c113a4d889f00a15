"""`tools/plan_blocks.py` as a user runs it: a process without torch."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# torch is made impossible to import, then the tool runs as __main__.
WITHOUT_TORCH = (
    "import os, runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
PACK = ("--lengths", "20000,12000,768", "--cp", "4", "--block-size", "512")
EXAMPLE = (*PACK, "--route", "queries")


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "tools/plan_blocks.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def figures(*arguments: str) -> dict:
    run = run_tool(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)
