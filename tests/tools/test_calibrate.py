"""`tools/calibrate.py`: the fit on made-up times, a small run on the CPU. No figure is judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.plan.predict import read_calibration

TOOLS = Path(__file__).resolve().parents[2] / "tools"

FIT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from calibrate import Sample, fit
true = json.loads(sys.argv[2])
samples = [
    Sample(pairs=rows * keys, rows=rows, runs=runs,
           ns=true[0] + true[1] * rows * keys + true[2] * rows + true[3] * runs)
    for rows in (64, 256, 1024) for keys in (64, 512) for runs in (1, 8, 64)
]
found, errors = fit(samples)
print(json.dumps([found, max(map(abs, errors))]))
"""


@pytest.mark.parametrize(
    "true", [[5e4, 0.25, 30.0, 700.0], [0.0, 1e-4, 0.0, 3.0], [1e5, 0.25, -2.0, 700.0]]
)
def test_the_fit_finds_the_terms_and_none_is_negative(true):
    run = subprocess.run(
        [sys.executable, "-c", FIT, str(TOOLS), json.dumps(true)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found, error = json.loads(run.stdout)
    assert min(found) >= 0
    if min(true) >= 0:
        assert found == pytest.approx(true, rel=1e-6, abs=1e-6)
        assert error < 1e-9
    else:
        assert found[2] == 0.0
        assert error > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "nowhere/c.json"), "--output nowhere/c.json: its folder is not there"),
        (("--device", "abacus"), "--device abacus: "),
        (("--link-gb-per-s", "nan"), "--link-gb-per-s nan must be a number above 0"),
        (("--link-latency-us=-1",), "--link-latency-us -1.0 must be a number at least 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_timed(arguments, message):
    options = ("--device", "cpu", "--link-gb-per-s", "5", "--output", "c.json", *arguments)
    # Timing with so many repeats would end in the timeout.
    run = subprocess.run(
        [sys.executable, str(TOOLS / "calibrate.py"), *options, "--repeats", "1000000"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def test_a_small_run_writes_a_calibration_that_plans(tmp_path):
    file = tmp_path / "cpu.json"
    run = subprocess.run(
        [
            sys.executable, str(TOOLS / "calibrate.py"), "--device", "cpu", "--heads", "2/1",
            "--head-dim", "16", "--dtype", "fp32", "--smallest", "8", "--repeats", "1",
            "--link-gb-per-s", "5", "--output", str(file),
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = read_calibration(file)
    assert (found.head_dim, found.num_heads_q, found.dtype) == (16, 2, "fp32")
    assert found.pair_ns > 0
    assert "calibrate.py --device cpu" in found.source
    run = subprocess.run(
        [
            sys.executable, str(TOOLS / "plan_blocks.py"), "--lengths", "4096,100", "--cp", "4",
            "--head-dim", "16", "--dtype", "fp32", "--calibration", str(file), "--tolerance",
            "auto",
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "<- taken" in " ".join(run.stdout.split())
