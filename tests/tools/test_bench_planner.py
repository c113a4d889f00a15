"""`tools/bench_planner.py`: baselines place every token once; a quick run. No time is judged."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"

BASELINES = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from plan_baselines import Problem, baselines_of, judge
from megatron_splitkv.plan import Anchors, Causal, Suffix, Window
from tests.packs import owner_of_rows, owner_of_tokens
lens = (1000, 0, 1, 333, 64, 2000)
specs = (Causal(), Window(100), Suffix(40), Anchors(((3, 900), (), (), (9,), (), (5, 5)), 2))
for queries in specs:
    for cp_size in (1, 3, 8):
        problem = Problem(lens=lens, cp_size=cp_size, queries=queries, block_size=64)
        for name, make in baselines_of(problem).items():
            plan = make(problem)
            assert (owner_of_tokens(plan) >= 0).all(), name
            assert len(owner_of_rows(plan)) == plan.model().num_rows, name
            assert judge(plan).imbalance >= 0, name
print("all placed")
"""


def test_baselines_place_every_token_once():
    run = subprocess.run(
        [sys.executable, "-c", BASELINES, str(TOOLS), str(TOOLS.parent)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "all placed", run.stderr


def test_a_quick_run_prints_tables():
    run = subprocess.run(
        [sys.executable, str(TOOLS / "bench_planner.py"), "--quick"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "### one document, window 4096" in run.stdout
    assert run.stdout.count("| split-KV |") == 7
    assert run.stdout.count("| nodes of 4 |") == run.stdout.count("| ranks alike |") == 4
