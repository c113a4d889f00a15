"""What a plan says that travels, against what a real run over threads hands to the network."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal, Full, Plan, Window, make_plan, num_head_groups
from megatron_splitkv.plan.report import AttentionShape, count_traffic, report_plan
from tests.ranks import Heads, Inputs, RankCall, RecordingTransport, random_inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIONS = ({}, {"keep_queries": True}, *({"partial_dtype": x} for x in ("fp32", "bf16", "fp16")))
HEADS = Heads(q=6, kv=3, dim_qk=5, dim_v=9)  # no field fills its 16 bytes by chance


def shape_of(dtype: str) -> AttentionShape:
    return AttentionShape(
        num_heads_q=HEADS.q, num_heads_kv=HEADS.kv, head_dim_qk=HEADS.dim_qk,
        head_dim_v=HEADS.dim_v, dtype=dtype,
    )  # fmt: skip


def run_recorded(
    plan: Plan, inputs: Inputs, config: SplitKVConfig
) -> tuple[list[int], list[int], list[int]]:
    """Bytes that each rank sent forward and backward, and its collectives of the forward pass."""

    def body(inner):
        transport = RecordingTransport(inner)
        call = RankCall(plan, inputs, transport, config)
        call.forward()
        forward, num_calls = transport.bytes_sent, len(transport.calls)
        call.backward()
        return forward, transport.bytes_sent - forward, num_calls

    forward, backward, calls = zip(*ThreadGroup(plan.cp_size).run(body), strict=True)
    return list(forward), list(backward), list(calls)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("queries", [Causal(), Window(9), Full()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_keys_are_those_of_the_wire(cp_size: int, queries, dtype: str):
    plan = make_plan([60, 128, 4], cp_size, queries=queries, block_size=8, route="keys")
    inputs = random_inputs(plan, HEADS, DTYPES[dtype])
    for num_stages in (None, 1, 2, 3):
        for options in OPTIONS:
            config = SplitKVConfig(num_stages=num_stages, route="keys", **options)
            forward, backward, _ = run_recorded(plan, inputs, config)
            report = report_plan(plan, shape_of(dtype), config)
            assert report.route == "keys"
            assert forward == list(report.bytes_forward)
            assert backward == list(report.bytes_backward)
            assert all(forward) == (cp_size > 1)


@pytest.mark.parametrize(("num_stages", "num_groups"), [(1, 1), (2, 1), (3, 3)])
def test_exchanges_of_keys_are_head_groups(num_stages: int, num_groups: int):
    """Three KV heads travel as one group or as three; keys go in one collective each."""
    plan = make_plan([60, 128], 2, block_size=8, route="keys")
    config = SplitKVConfig(num_stages=num_stages, route="keys")
    _, _, calls = run_recorded(plan, random_inputs(plan, HEADS), config)
    assert count_traffic(plan, shape_of("fp32"), config).num_exchanges == num_groups
    assert calls == [num_groups] * 2
    alone = make_plan([60], 1, route="keys")
    assert count_traffic(alone, shape_of("fp32"), config).num_exchanges == 0


def test_whole_documents_cost_no_bytes():
    plan = make_plan([64] * 8, 4, block_size=64, route="keys")
    report = report_plan(plan, shape_of("bf16"), SplitKVConfig(route="keys"))
    assert report.bytes_forward == report.bytes_backward == (0, 0, 0, 0)


def test_bytes_of_a_key_by_hand():
    """Each field is padded to 16 bytes. Three heads: k 30 -> 32, v 54 -> 64; one: 10 and 18."""
    shape, config = shape_of("bf16"), SplitKVConfig(partial_dtype="fp32")
    assert shape.key_bytes(config, 1) == (32 + 64, 64 + 112)
    assert shape.key_bytes(config, 3) == (3 * (16 + 32), 3 * (32 + 48))
    scaled = replace(config, partial_dtype="fp16")
    assert shape.key_bytes(scaled, 1) == (32 + 64, 32 + 64 + 2 * 16)
    assert shape.key_bytes(scaled, 3) == (3 * (16 + 32), 3 * (16 + 32 + 2 * 16))
    assert shape.key_bytes(SplitKVConfig(), 3) == shape.key_bytes(scaled, 3)


def test_ranks_attend_with_their_own_rows_alone():
    found = {
        route: count_traffic(
            make_plan([256], 4, block_size=16, route=route),
            shape_of("bf16"),
            SplitKVConfig(route=route, num_stages=3),
        )
        for route in ("keys", "queries")
    }
    assert found["keys"].attended.tolist() == [64] * 4
    assert found["queries"].attended.min() > 64
    num_rows = 64
    assert num_head_groups(HEADS.kv, HEADS.q, num_rows, 3) == found["keys"].num_exchanges == 3
    assert num_head_groups(HEADS.kv, HEADS.q, num_rows, None) == 1
