"""Predicted times and projections of `tools/plan_blocks.py`, from a calibration."""

import json
from pathlib import Path

import pytest

from tests.tools.plan_tool import EXAMPLE, figures, run_tool


def write_calibration(path: Path, **changes) -> str:
    fields = dict(
        device="made up", dtype="bf16", head_dim=128, num_heads_q=32, num_heads_kv=8, pair_ns=1e-3,
        row_ns=0.5, run_ns=10.0, base_ns=0.0, worst_error=0.1, link_gb_per_s=400.0,
        link_latency_us=10.0, source="by hand",
    )  # fmt: skip
    path.write_text(json.dumps(fields | changes))
    return str(path)


def test_auto_takes_the_least_predicted_time(tmp_path):
    options = ("--lengths", "65536,4096,30000", "--cp", "8", "--tolerance", "auto")
    file = write_calibration(tmp_path / "c.json")
    found = figures(*options, "--calibration", file)
    times = {float(name): entry["layer_us"] for name, entry in found["predicted"].items()}
    assert times[found["tolerance"]] == min(times.values())
    assert "<- taken" in " ".join(run_tool(*options, "--calibration", file).stdout.split())
    assert "--tolerance auto needs --calibration" in run_tool(*options).stderr


def test_a_projection_says_that_it_is_one(tmp_path):
    file = write_calibration(tmp_path / "c.json")
    options = ("--lengths", "65536,4096", "--cp", "8", "--calibration", file, "--simulate")
    run = run_tool(*options)
    assert run.returncode == 0, run.stderr
    words = " ".join(run.stdout.split())
    assert "PROJECTION of one attention layer" in words
    assert "not measured" in words
    steps = figures(*options)["projection"]
    assert [step["cp_size"] for step in steps] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(step["num_tokens"] == 69632 * step["cp_size"] // 8 for step in steps)
    assert steps[0]["efficiency"] == 1.0
    assert "\N{HORIZONTAL ELLIPSIS}" not in run.stdout  # nothing is cut off
    bad = run_tool("--lengths", "5", "--cp", "2", "--simulate")
    assert "--simulate needs --calibration" in bad.stderr


def test_a_projection_over_a_slower_network_is_slower_and_names_it(tmp_path):
    file = write_calibration(tmp_path / "c.json")
    options = ("--lengths", "65536", "--cp", "8", "--calibration", file, "--simulate")
    nodes = (*options, "--ranks-per-node", "8", "--network-gb-per-s", "0.001")
    near, far = (figures(*given)["projection"] for given in (options, nodes))
    assert near[0] == far[0]  # inside a node
    assert all(a["exchange_us"] < b["exchange_us"] for a, b in zip(near[1:], far[1:], strict=True))
    words = " ".join(run_tool(*nodes).stdout.split())
    assert "between nodes of 8 ranks 0.001 GB/s, as given" in words
    bad = run_tool(*options, "--network-gb-per-s", "5")
    assert "--network-gb-per-s needs --ranks-per-node N" in bad.stderr
    alone = ("--lengths", "65536", "--cp", "8", "--ranks-per-node", "8", "--network-gb-per-s", "5")
    bad = run_tool(*alone)
    assert bad.returncode == 2
    assert "--network-gb-per-s is of predictions, which need --calibration PATH" in bad.stderr


@pytest.mark.parametrize(
    "option",
    [
        (),
        ("--route", "queries"),
        ("--tolerance", "0.3"),
        ("--ranks-per-node", "2"),
        ("--speeds", "1,1,1,.5"),
    ],
)
def test_a_projection_starts_from_the_plan_that_is_shown(tmp_path, option):
    file = write_calibration(tmp_path / "c.json", pair_ns=1.0)
    lens = ",".join(str(1000 + 777 * i) for i in range(9))
    found = figures("--lengths", lens, "--cp", "4", "--calibration", file, "--simulate", *option)
    (predicted,) = found["predicted"].values()
    assert found["projection"][0]["layer_us"] == predicted["layer_us"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pair_ns": 0}, "c.json: calibration: pair_ns=0 must be a number above 0"),
        ({"pair_ns": float("nan")}, "pair_ns=nan must be a number above 0"),
        ({"row_ns": -1}, "row_ns=-1 must be a number at least 0"),
        ({"more": 1}, "must be a JSON object with the fields"),
        ({"head_dim": 64}, "calibration of head_dim=64 and bf16 says nothing about head dims 128"),
    ],
)
def test_a_bad_calibration_is_refused(tmp_path, changes, message):
    file = write_calibration(tmp_path / "c.json", **changes)
    run = run_tool(*EXAMPLE, "--calibration", file)
    assert run.returncode == 2
    assert message in run.stderr
