"""A calibration given as an argument: what is read from it, what is refused, what it changes."""

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.mcore.timing import timing_from_args
from megatron_splitkv.plan import Causal, Machine, Planner, Timing, make_plan
from megatron_splitkv.plan.predict import Calibration, make_plan_by_time
from megatron_splitkv.plan.report import AttentionShape

# A slow link: keeping documents whole is worth some imbalance.
CALIBRATION = Calibration(
    device="made up", dtype="bf16", head_dim=64, num_heads_q=2, num_heads_kv=2, pair_ns=0.01,
    row_ns=2.0, run_ns=30.0, base_ns=500.0, worst_error=0.0, link_gb_per_s=0.1,
    link_latency_us=1.0, source="by hand",
)  # fmt: skip
SHAPE = AttentionShape(num_heads_q=4, num_heads_kv=2, head_dim_qk=64, head_dim_v=64, dtype="bf16")
LENS = [3000, 2000, 900, 800, 700, 500, 200, 92]

Arguments = Callable[..., Namespace]


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """Arguments of a run with the calibration in a file."""
    path = tmp_path / "device.json"
    path.write_text(CALIBRATION.to_json())

    def parsed(**changes: object) -> Namespace:
        values: dict[str, object] = {
            "splitkv_calibration": str(path),
            "splitkv_balance_tolerance": SplitKVConfig().balance_tolerance,
            "num_attention_heads": 8,
            "hidden_size": 512,
            "kv_channels": None,
            "num_query_groups": 4,
            "group_query_attention": True,
            "tensor_model_parallel_size": 2,
            "multi_latent_attention": False,
            "bf16": True,
            "fp16": False,
        }
        return Namespace(**values | changes)

    return parsed


def test_no_calibration_is_no_timing(arguments: Arguments):
    assert timing_from_args(arguments(splitkv_calibration=None)) is None


def test_shape_is_that_of_a_tensor_parallel_rank(arguments: Arguments):
    assert timing_from_args(arguments()) == Timing(calibration=CALIBRATION, shape=SHAPE)


def test_latent_attention_counts_both_parts_of_a_key(arguments: Arguments):
    latent = {"qk_head_dim": 48, "qk_pos_emb_head_dim": 16, "v_head_dim": 64}
    args = arguments(
        multi_latent_attention=True, kv_channels=7, group_query_attention=False, **latent
    )
    shape = dataclasses.replace(SHAPE, num_heads_kv=4)
    assert timing_from_args(args) == Timing(calibration=CALIBRATION, shape=shape)


@pytest.mark.parametrize(
    ("changes", "num_heads_kv"),
    [
        ({"num_query_groups": 1}, 1),
        ({"num_query_groups": 8}, 4),
        ({"group_query_attention": False}, 4),
    ],
)
def test_query_groups_are_shared_by_tensor_parallel_ranks(
    arguments: Arguments, changes: dict[str, object], num_heads_kv: int
):
    timing = timing_from_args(arguments(**changes))
    assert timing is not None and timing.shape.num_heads_kv == num_heads_kv


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splitkv_calibration": "none.json"}, "--splitkv-calibration: .*No such file.*none.json"),
        ({"splitkv_balance_tolerance": 0.1}, "leave out --splitkv-balance-tolerance=0.1"),
        ({"kv_channels": 128}, "head_dim=64 and bf16 says nothing about head dims 128 and 128"),
        ({"bf16": False}, "says nothing about head dims 64 and 64 in fp32"),
        ({"num_attention_heads": None}, "give --num-attention-heads and --hidden-size too"),
    ],
)
def test_refusals(arguments: Arguments, changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        timing_from_args(arguments(**changes))


def test_book_plans_by_time():
    """The slow link makes a looser tolerance win; nodes and speeds hold beside it."""
    config = SplitKVConfig(ranks_per_node=2, rank_speeds=(1.0, 1.0, 1.0, 0.5))
    machine = dataclasses.replace(
        CALIBRATION.machine, ranks_per_node=2, rank_speeds=config.rank_speeds
    )
    timing = Timing(calibration=CALIBRATION, shape=SHAPE)
    best, tolerance, _ = make_plan_by_time(
        LENS, 4, shape=SHAPE, config=config, calibration=CALIBRATION, machine=machine
    )
    assert tolerance > config.balance_tolerance
    assert PlanBook(config, timing=timing).planner(4)(LENS) == best


def test_planner_without_timing_takes_the_tolerance_and_the_speeds():
    config = SplitKVConfig(balance_tolerance=0.02, rank_speeds=(1.0, 0.5), block_size=64)
    machine = Machine(rank_speeds=(1.0, 0.5))
    expected = make_plan(LENS, 2, block_size=64, tolerance=0.02, machine=machine)
    assert Planner(cp_size=2, config=config, queries=Causal())(LENS) == expected
    assert expected.costs[0] > 1.5 * expected.costs[1]
