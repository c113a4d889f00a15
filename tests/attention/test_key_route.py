"""What is particular where keys travel: whole documents stay, groups of heads take turns."""

import pytest
import torch

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Full, Window, make_plan
from tests.ranks import (
    Heads,
    RankCall,
    RecordingTransport,
    assert_outputs,
    dense,
    random_inputs,
    run_simulated,
)

DOCS = [33, 5, 90, 40]
HEADS = Heads(q=12, kv=6, dim_qk=8, dim_v=16)


def collectives(plan, config):
    """What each rank sends, forward then backward."""

    def body(transport):
        recording = RecordingTransport(transport)
        call = RankCall(plan, inputs, recording, config)
        call.forward()
        num_forward = len(recording.calls)
        call.backward()
        return recording.calls[:num_forward], recording.calls[num_forward:]

    inputs = random_inputs(plan, HEADS)
    return ThreadGroup(plan.cp_size).run(body)


@pytest.mark.parametrize(("num_stages", "num_groups"), [(1, 1), (2, 2), (4, 3), (6, 6), (9, 6)])
@pytest.mark.parametrize("keep_queries", [False, True])
def test_each_group_is_gathered_once_a_pass_and_returned_once(num_stages, num_groups, keep_queries):
    plan = make_plan(DOCS, 3, block_size=4, route="keys")
    config = SplitKVConfig(num_stages=num_stages, keep_queries=keep_queries)
    counts = build_layout(plan, 0).keys.counts
    # fp32: k of 8 and v of 16 elements; dk and dv come back as such.
    row_bytes = 6 // num_groups * (8 + 16) * 4
    for rank, (forward, backward) in enumerate(collectives(plan, config)):
        out = ("exchange", row_bytes, tuple(counts[rank]), tuple(counts[:, rank]))
        back = ("exchange", row_bytes, tuple(counts[:, rank]), tuple(counts[rank]))
        assert forward == [out] * num_groups
        gathers = 0 if keep_queries else num_groups
        assert backward.count(out) == gathers and backward.count(back) == num_groups
        assert len(backward) == gathers + num_groups


def test_whole_documents_send_nothing():
    plan = make_plan([64, 64, 64], 3, route="keys")
    assert collectives(plan, SplitKVConfig()) == [([], [])] * 3
    inputs = random_inputs(plan, HEADS, seed=1)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


def test_documents_of_pads_alone_are_written():
    plan = make_plan([0, 3], 2, padded_lens=[6, 3], route="keys")
    inputs = random_inputs(plan, HEADS, seed=5, has_dlse=True)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


def test_a_rank_without_shared_documents_beside_ranks_that_share():
    plan = make_plan([64, 32, 96], 3, route="keys", block_size=4, tolerance=0.3)
    shared = [len(build_layout(plan, rank).keys.shared) for rank in range(3)]
    assert 0 in shared and max(shared) > 0
    inputs = random_inputs(plan, HEADS, seed=2, has_dlse=True)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


@pytest.mark.parametrize("queries", [Window(7), Full(), Causal()], ids=str)
def test_a_layer_may_have_another_mask_than_the_plan(queries):
    plan = make_plan(DOCS, 4, padded_lens=[40, 5, 96, 41], block_size=4, route="keys")
    inputs = random_inputs(plan, HEADS, seed=3)
    for num_stages in (None, 3):
        got = run_simulated(plan, inputs, SplitKVConfig(num_stages=num_stages), queries)
        assert_outputs(got, dense(plan, inputs, queries))


def test_what_pads_hold_reaches_nothing():
    plan = make_plan(DOCS, 3, padded_lens=[40, 8, 96, 48], block_size=4, route="keys")
    inputs = random_inputs(plan, HEADS, seed=4)
    expected, exact = run_simulated(plan, inputs).fingerprint(), dense(plan, inputs)
    is_pad = torch.ones(sum(plan.padded_lens), dtype=torch.bool)
    start = 0
    for length, padded in zip(plan.doc_lens, plan.padded_lens, strict=True):
        is_pad[start : start + length] = False
        start += padded
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout):
        tensor[is_pad] = torch.nan
    got = run_simulated(plan, inputs)
    assert got.fingerprint() == expected
    assert_outputs(got, exact)


def test_views_of_a_fused_projection():
    """As Megatron passes them: rows of q, k and v side by side in one tensor."""
    plan = make_plan(DOCS, 2, block_size=4, route="keys")
    config = SplitKVConfig(num_stages=2)

    def body(transport, is_fused):
        layout = build_layout(plan, transport.rank)
        context = SplitKVContext(layout=layout, transport=transport, config=config)
        generator = torch.Generator().manual_seed(transport.rank)
        fused = torch.randn(layout.num_kv_rows, 6, 2 * 8 + 8 + 16, generator=generator)
        fused.requires_grad_()
        q, k, v = fused.split([16, 8, 16], dim=2)
        q = q.reshape(-1, 12, 8)
        if not is_fused:
            k, v = k.contiguous(), v.contiguous()
        out, _ = splitkv_attention(q, k, v, context)
        out.square().sum().backward()
        return out.detach(), fused.grad

    group = ThreadGroup(2)
    apart = group.run(lambda transport: body(transport, False))
    fused = group.run(lambda transport: body(transport, True))
    for mine, theirs in zip(apart, fused, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("route", ["queries", "keys"])
@pytest.mark.parametrize(
    ("k_shape", "v_shape", "message"),
    [
        ((2, 16), (1, 16), r"v has shape \[32, 1, 16\], needs \[32, 2, any\]"),
        ((2, 16), (4, 16), r"v has shape \[32, 4, 16\], needs \[32, 2, any\]"),
        ((2, 8), (2, 16), r"k has shape \[32, 2, 8\], needs \[any, any, 16\]"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused_on_every_rank(
    route, k_shape, v_shape, message
):
    """Also where all keys travel, so that no kernel call sees k and v of this rank."""
    plan = make_plan([64], 2, block_size=4, route=route)

    def body(transport):
        layout = build_layout(plan, transport.rank)
        context = SplitKVContext(layout=layout, transport=transport)
        q, k, v = (torch.zeros(32, *shape) for shape in ((4, 16), k_shape, v_shape))
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            splitkv_attention(q, k, v, context)
        return True

    assert ThreadGroup(2).run(body) == [True, True]


def test_heads_that_do_not_divide_are_refused():
    plan = make_plan([9], 1, route="keys")
    context = SplitKVContext(layout=build_layout(plan, 0), transport=None)
    q, k = torch.zeros(9, 4, 8), torch.zeros(9, 3, 8)
    with pytest.raises(
        ValueError, match="q has 4 heads, needs a multiple of the 3 heads of k and v"
    ):
        splitkv_attention(q, k, k, context)
