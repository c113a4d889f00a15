"""A run's planner: pickled, called in a worker, and no other than `make_plan`."""

import pickle
import subprocess
import sys

import pytest

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal, Planner, Suffix, Timing, Window, make_plan
from megatron_splitkv.plan.predict import Calibration
from megatron_splitkv.plan.report import AttentionShape

LENS = [3000, 2000, 900, 800, 700, 500, 200, 92]
CALIBRATION = Calibration(
    device="made up", dtype="bf16", head_dim=64, num_heads_q=2, num_heads_kv=2, pair_ns=0.01,
    row_ns=2.0, run_ns=30.0, base_ns=500.0, worst_error=0.0, link_gb_per_s=10.0,
    link_latency_us=1.0, source="by hand",
)  # fmt: skip


def test_defaults_are_those_of_make_plan():
    assert Planner(cp_size=4)(LENS) == make_plan(LENS, 4)


def test_settings_reach_the_plan():
    config = SplitKVConfig(block_size=64, balance_tolerance=0.05)
    found = Planner(cp_size=4, config=config, queries=Window(256))(LENS)
    assert found == make_plan(LENS, 4, queries=Window(256), block_size=64, tolerance=0.05)
    assert found != Planner(cp_size=4, config=config, queries=Causal())(LENS)


@pytest.mark.parametrize("route", ["queries", "keys"])
@pytest.mark.parametrize("has_timing", [False, True])
def test_route_reaches_the_plan(route, has_timing):
    shape = AttentionShape(
        num_heads_q=2, num_heads_kv=1, head_dim_qk=64, head_dim_v=64, dtype="bf16"
    )
    timing = Timing(calibration=CALIBRATION, shape=shape) if has_timing else None
    planner = Planner(cp_size=4, config=SplitKVConfig(route=route), timing=timing)
    assert planner(LENS).route == route


def test_mask_without_the_route_is_refused():
    with pytest.raises(ValueError, match=r"route='keys' is for causal, .* take route 'queries'"):
        Planner(cp_size=4, config=SplitKVConfig(route="keys"), queries=Suffix(8))


def test_a_pickled_planner_plans_where_there_is_no_torch():
    planner = Planner(cp_size=4, config=SplitKVConfig(balance_tolerance=0.05))
    program = (
        "import pickle, sys; sys.modules['torch'] = None; "
        f"print(pickle.loads({pickle.dumps(planner)!r})({LENS}).fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == planner(LENS).fingerprint


def test_calibration_of_another_head_dim_is_refused():
    shape = AttentionShape(
        num_heads_q=2, num_heads_kv=2, head_dim_qk=128, head_dim_v=128, dtype="bf16"
    )
    with pytest.raises(ValueError, match="head_dim=64 and bf16 says nothing about head dims 128"):
        Timing(calibration=CALIBRATION, shape=shape)


def test_head_dims_that_no_calibration_has_are_told_apart():
    shape = AttentionShape(
        num_heads_q=2, num_heads_kv=2, head_dim_qk=192, head_dim_v=128, dtype="bf16"
    )
    with pytest.raises(ValueError, match="192 and 128 in bf16; none can be measured; leave it out"):
        Timing(calibration=CALIBRATION, shape=shape)
