"""Buffers are those of one stage: what is alive beside the inputs, by hand and by growth."""

from unittest import mock

import pytest
import torch

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Full, exchange, make_plan
from tests.live_bytes import LiveBytes
from tests.ranks import Heads, RankCall, random_inputs

HEADS = Heads(q=8, kv=2, dim_qk=32, dim_v=32)
LENGTH = 1024


def peaks(cp_size: int, num_stages: int | None, **options: object) -> tuple[float, float]:
    """Bytes alive at most in forward and in backward, of the rank that has most."""
    plan = make_plan([LENGTH], cp_size, queries=Full(), block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)
    config = SplitKVConfig(num_stages=num_stages, **options)

    def body(transport):
        call = RankCall(plan, inputs, transport, config)
        with LiveBytes() as forward:
            call.forward()
        with LiveBytes() as backward:
            call.backward()
        return forward.peak, backward.peak

    return tuple(map(max, zip(*ThreadGroup(cp_size).run(body), strict=True)))


@pytest.mark.parametrize("phase", [0, 1], ids=["forward", "backward"])
def test_streamed_peaks_fall_with_every_doubling_of_ranks(phase):
    """A24, fully streamed."""
    found = [peaks(cp_size, cp_size - 1)[phase] for cp_size in (2, 4, 8)]
    assert found[0] >= 1.6 * found[1]
    assert found[1] >= 1.6 * found[2]


@pytest.mark.parametrize("phase", [0, 1], ids=["forward", "backward"])
def test_peaks_fall_with_every_doubling_of_ranks_by_default(phase):
    """A24, and less is alive than with the rows of one rank at a time."""
    with mock.patch.object(exchange, "MIN_STAGE_ROWS", LENGTH // 128):
        found = [peaks(cp_size, None)[phase] for cp_size in (2, 4, 8)]
    assert found[0] >= 1.6 * found[1]
    assert found[1] >= 1.6 * found[2]
    assert found[2] <= 0.7 * peaks(8, 7)[phase]


def test_forward_peak_by_hand():
    """The worst moment, in units of one rank's rows: while the answers to the last stage arrive."""
    row = LENGTH // 8 * HEADS.q
    own = row * (32 * 4 + 4)  # merged out and lse, fp32
    queries = row * 32 * 2  # of a peer, as gathered
    partial = row * (32 * 4 + 4)  # out and lse of one stage, fp32
    wire = row * (32 * 2 + 4 + 4)  # the same as it travels: fp16, lse and scale
    forward, _ = peaks(8, 7)
    # Gathered now and next, each with what was sent for it, then answers sent and received twice.
    assert forward <= own + 4 * queries + partial + 4 * wire
    assert forward >= own + 2 * queries + partial


def test_one_stage_takes_the_rows_of_all_ranks():
    streamed, whole = peaks(8, 7), peaks(8, 1)
    assert whole[0] > 2.5 * streamed[0]
    assert whole[1] > 2.5 * streamed[1]


def test_kept_queries_are_all_that_stays():
    """What forward leaves alive beside its results."""
    plan = make_plan([LENGTH], 4, queries=Full(), block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)

    def body(transport, keep_queries):
        config = SplitKVConfig(num_stages=3, keep_queries=keep_queries)
        call = RankCall(plan, inputs, transport, config)
        with LiveBytes() as alive:
            call.forward()
            return alive.now

    group = ThreadGroup(4)
    rows = LENGTH // 4 * HEADS.q
    results = rows * (32 * 2 + 4)
    assert group.run(lambda transport: body(transport, False)) == [results] * 4
    kept = 3 * rows * 32 * 2
    assert group.run(lambda transport: body(transport, True)) == [results + kept] * 4


def test_queries_are_not_kept_where_no_backward_follows():
    plan = make_plan([LENGTH], 4, queries=Full(), block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)

    def peak(transport, keep_queries):
        config = SplitKVConfig(num_stages=3, keep_queries=keep_queries)
        with torch.no_grad(), LiveBytes() as alive:
            RankCall(plan, inputs, transport, config).forward()
        return alive.peak

    group = ThreadGroup(4)
    plain, keeping = (group.run(lambda t, k=k: peak(t, k)) for k in (False, True))
    assert keeping == plain
