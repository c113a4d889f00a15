"""`tools/bench_ops.py` as a user runs it, on a tiny problem. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_ops.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_json_report() -> None:
    run = _run("--rows", "32", "--heads", "2/1", "--head-dim", "16", "--repeats", "2", "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    ops = [(result["op"], result["dtype"]) for result in report["results"]]
    assert ops == [
        *(("forward", "fp32"), ("backward", "fp32")),
        *(("forward", "bf16"), ("backward", "bf16")),
        *(("merge", "fp32"), ("merge", "bf16")),
    ]
    assert all(result["rate"] > 0 for result in report["results"])
    assert max(report["rel_l2"].values()) < 1e-5


def test_bad_arguments_are_named() -> None:
    for arguments, message in (
        (("--heads", "3/2"), "'3/2': kv heads must divide query heads"),
        (("--dtypes", "fp64"), "'fp64' must be one of fp32, bf16, fp16"),
        (("--rows", "0"), "'0' must be a whole number, at least 1"),
    ):
        run = _run(*arguments)
        assert run.returncode == 2
        assert message in run.stderr
