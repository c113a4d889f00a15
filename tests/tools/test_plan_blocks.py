"""`tools/plan_blocks.py` as a user runs it: a process without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_splitkv.plan import Causal, Full, Suffix, Window, make_plan

ROOT = Path(__file__).resolve().parents[2]
# torch is made impossible to import, then the tool runs as __main__.
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
EXAMPLE = ("--lengths", "20000,12000,768", "--cp", "4", "--block-size", "512")


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "tools/plan_blocks.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def figures(*arguments: str) -> dict:
    run = run_tool(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


def test_json_has_the_promised_keys():
    found = figures(*EXAMPLE)
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    assert found["fingerprint"] == plan.fingerprint
    assert found["cost_max_over_mean"] <= 1.02
    assert found["tokens_max_over_mean"] == 1.0
    assert found["planning_ms"] > 0
    assert found["bytes_forward"] > 0
    assert found["bytes_backward"] > 0
    assert found["block_size"] == 512
    assert [rank["cost"] for rank in found["ranks"]] == list(plan.costs)
    assert [rank["tokens"] for rank in found["ranks"]] == [8192] * 4


def test_the_script_runs_by_its_path():
    command = [sys.executable, str(ROOT / "tools/plan_blocks.py"), *EXAMPLE, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["tokens_max_over_mean"] == 1.0


def test_table_shows_ranks_and_ratios():
    run = run_tool(*EXAMPLE)
    assert run.returncode == 0, run.stderr
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    for text in ("max/mean", plan.fingerprint, "8,192", *(f"{cost:,}" for cost in plan.costs)):
        assert text in run.stdout
    assert "3 documents" in run.stdout


def test_table_says_what_was_counted_and_what_a_ring_would_send():
    run = run_tool(*EXAMPLE)
    words = " ".join(run.stdout.split())
    assert "sent by this rank in one attention layer, for 32 query heads of dim 128" in words
    assert "KV ring or all-gather 100.66 MB fwd, 201.33 MB bwd (8 kv heads, dense: every" in words
    found = figures(*EXAMPLE)
    forward, backward = (found[f"bytes_{name}"] / 4e6 for name in ("forward", "backward"))
    assert f"Split-KV {forward:.2f} MB fwd, {backward:.2f} MB bwd; KV ring" in words


@pytest.mark.parametrize(
    ("option", "num_heads_kv"),
    [((), 8), (("--heads", "32/8"), 8), (("--heads", "32/2"), 2), (("--heads", "32"), 32)],
)
def test_kv_heads_weigh_in_the_ring_alone(option, num_heads_kv):
    found = figures(*EXAMPLE, *option)
    assert found["ring_bytes_forward"] == 3 * 32768 * num_heads_kv * 2 * 128 * 2
    assert found["ring_bytes_backward"] == 2 * found["ring_bytes_forward"]
    assert found["bytes_forward"] == figures(*EXAMPLE)["bytes_forward"]


@pytest.mark.parametrize(
    ("option", "queries"),
    [
        ((), Causal()),
        (("--window", "100"), Window(100)),
        (("--full",), Full()),
        (("--suffix", "64"), Suffix(64)),
    ],
)
def test_masks(option, queries):
    plan = make_plan([700, 300], 2, queries=queries, tolerance=0.001)
    assert figures("--lengths", "700,300", "--cp", "2", *option)["fingerprint"] == plan.fingerprint


def test_options_change_the_bytes():
    base = figures(*EXAMPLE, "--stages", "4")
    half = figures(*EXAMPLE, "--partial-dtype", "bf16", "--keep-queries", "--heads", "16/2")
    assert half["bytes_forward"] < base["bytes_forward"] / 2
    assert half["bytes_backward"] < base["bytes_backward"] / 2
    assert half["fingerprint"] == base["fingerprint"]
    wide = figures(*EXAMPLE, "--dtype", "fp32", "--head-dim", "256")
    assert wide["bytes_forward"] > base["bytes_forward"]


@pytest.mark.parametrize("lengths", ["0", "0,0,5", "1"])
def test_short_packs(lengths):
    found = figures("--lengths", lengths, "--cp", "4")
    assert len(found["ranks"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "12,x", "--cp", "4"), "'12,x' must be whole numbers with commas between"),
        (("--lengths", "", "--cp", "4"), "'' must be whole numbers with commas between"),
        (("--lengths", "5,-3", "--cp", "4"), "'5,-3' holds a negative document length"),
        (("--lengths", "5", "--cp", "0"), "cp_size=0 must be at least 1"),
        (("--lengths", "5", "--cp", "-2"), "cp_size=-2 must be at least 1"),
        (("--lengths", "5", "--cp", "2", "--block-size", "0"), "block_size=0 must be a positive"),
        (
            ("--lengths", "5", "--cp", "2", "--block-size", "100"),
            "block_size=100 must be a positive multiple of 64 (the kernels' KV tile); use 128",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--tolerance", "nan"),
            "balance_tolerance=nan must lie in [0, 1]",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--tolerance=-1"),
            "balance_tolerance=-1.0 must lie in [0, 1]",
        ),
        (("--lengths", "5", "--cp", "100000"), "--cp 100000 must be at most 1024 ranks"),
        (
            ("--lengths", "99999999999999999999", "--cp", "4"),
            "doc_lens: length=99999999999999999999 must fit into 64 bits",
        ),
        (
            ("--lengths", "5,5000000000", "--cp", "4"),
            "document 1 of 5000000000 tokens brings query rows times keys of the pack beyond 2^61",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--heads", "32/5"),
            "num_heads_kv=5 must divide num_heads_q=32",
        ),
        (("--lengths", "5", "--cp", "2", "--window", "0"), "window size=0 must be at least 1 key"),
        (("--lengths", "5", "--cp", "2", "--suffix", "0"), "suffix num_rows=0 must be at least 1"),
        (("--lengths", "5", "--cp", "2", "--stages", "0"), "num_stages=0 must be at least 1"),
        (("--lengths", "5", "--cp", "2", "--heads", "8/x"), "'8/x' must be query heads / kv heads"),
        (
            ("--lengths", "5", "--cp", "2", "--head-dim", "0"),
            "heads and head dims must be at least",
        ),
        (("--lengths", "5", "--cp", "2", "--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("--lengths", "5", "--cp", "2", "--full", "--window", "3"), "not allowed with argument"),
        (("--cp", "2"), "required: --lengths"),
        (("--lengths", "5", "--cp", "2", "--tolerence", "1"), "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, message):
    run = run_tool(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("plan_blocks.py: error: ")
    assert message in last
    assert "Traceback" not in run.stderr
