"""Inputs as callers have them, any strides and flags, and what is refused by message."""

import re
from dataclasses import replace

import pytest
import torch

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout, shard_rows
from megatron_splitkv.plan import Anchors, Causal, Suffix, make_plan
from tests.ranks import Heads, RankCall, assert_outputs, dense, join_ranks, random_inputs


def forms_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Equal tensors with other strides: rows apart, heads apart, heads outside rows."""
    rows, heads, dim = tensor.shape
    fused = torch.full((rows, heads, 3 * dim), torch.nan, dtype=tensor.dtype)
    fused[..., dim : 2 * dim] = tensor
    return {
        "fused": fused[..., dim : 2 * dim],
        "bhsd": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "last": tensor.transpose(1, 2).contiguous().transpose(1, 2),
    }


@pytest.mark.parametrize("form", ["fused", "bhsd"])
@pytest.mark.parametrize("cp_size", [1, 3])
def test_strided_views(form, cp_size):
    plan = make_plan([9, 8], cp_size, block_size=2)
    inputs = random_inputs(plan, Heads(), seed=3)

    def body(transport):
        call = RankCall(plan, inputs, transport, SplitKVConfig())
        views = [forms_of(leaf.detach())[form].requires_grad_() for leaf in call.leaves[:3]]
        call.leaves[:3] = views
        call.upstream[0] = forms_of(call.upstream[0])[form]
        call.forward()
        call.backward()
        return call.parts

    assert_outputs(join_ranks(plan, ThreadGroup(cp_size).run(body)), dense(plan, inputs))


@pytest.mark.parametrize("cp_size", [1, 3])
def test_gradient_of_a_plain_sum(cp_size):
    """`out.sum()` feeds one expanded number, with strides of zero."""
    plan = make_plan([9, 8], cp_size, block_size=2)
    inputs = random_inputs(plan, Heads(), seed=3)
    inputs = replace(inputs, dout=torch.ones_like(inputs.dout))

    def body(transport):
        call = RankCall(plan, inputs, transport, SplitKVConfig())
        call.forward()
        given = [leaf for leaf in call.leaves if leaf is not None]
        call.grads = [*torch.autograd.grad(call.out.sum(), given), None, None, None]
        return call.parts

    assert_outputs(join_ranks(plan, ThreadGroup(cp_size).run(body)), dense(plan, inputs))


def test_frozen_inputs_get_no_gradient():
    plan = make_plan([9, 8], 2, block_size=2)
    inputs = random_inputs(plan, Heads(), seed=3)

    def body(transport):
        call = RankCall(plan, inputs, transport, SplitKVConfig())
        call.leaves[1].requires_grad_(False)
        call.forward()
        call.out.backward(call.upstream[0])
        assert call.leaves[1].grad is None
        return [call.out.detach(), call.lse.detach(), call.leaves[0].grad, call.leaves[1].detach(),
                call.leaves[2].grad, None, None, None]  # fmt: skip

    got, expected = join_ranks(plan, ThreadGroup(2).run(body)), dense(plan, inputs)
    assert_outputs(replace(got, dk=expected.dk), expected)


def test_without_gradients():
    plan = make_plan([9, 8], 2, block_size=2)
    inputs = random_inputs(plan, Heads(), seed=3)

    def body(transport):
        call = RankCall(plan, inputs, transport, SplitKVConfig())
        with torch.no_grad():
            call.forward()
        assert not call.out.requires_grad
        return shard_rows(inputs.q, call.rows).shape == call.out.shape

    assert ThreadGroup(2).run(body) == [True, True]


# Refusals. A6: a group that is missing or another one must raise, not run.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_or_wrong_group_raises_instead_of_running(rank):
    layout = build_layout(make_plan([64], 2), rank)
    message = f"layout is for rank {rank} of cp_size=2, but got no transport; pass the transport"
    with pytest.raises(ValueError, match=re.escape(message)):
        SplitKVContext(layout=layout, transport=None)

    def wrong_group(transport):
        with pytest.raises(ValueError, match=rf"got rank {transport.rank} of a group of 3"):
            SplitKVContext(layout=layout, transport=transport)

    ThreadGroup(3).run(wrong_group)


def test_a_layout_of_another_rank_raises():
    layout = build_layout(make_plan([64], 2), 1)

    def body(transport):
        if transport.rank == 0:
            with pytest.raises(
                ValueError, match=r"layout is for rank 1 .* got rank 0 of a group of 2"
            ):
                SplitKVContext(layout=layout, transport=transport)

    ThreadGroup(2).run(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (7, 4, 16)}, "q has shape (7, 4, 16), needs [8, heads, dim]: this rank's rows"),
        ({"k": (9, 2, 16)}, "k has shape (9, 2, 16), needs [8, heads, dim]"),
        ({"v": (8, 32)}, "v has shape (8, 32), needs [8, heads, dim]"),
        ({"block_kv": (8, 2, 16)}, "block_kv must be given exactly when the layout has anchors"),
        ({"k": (8, 3, 16), "v": (8, 3, 16)}, "q has 4 heads, needs a multiple of the 3 heads"),
        ({"k": (8, 2, 8)}, "k has shape [8, 2, 8], needs [any, any, 16]"),
        ({"v": (8, 4, 16)}, "v has shape [8, 4, 16], needs [8, 2, any]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    layout = build_layout(make_plan([8], 1), 0)
    shapes = {"q": (8, 4, 16), "k": (8, 2, 16), "v": (8, 2, 16)} | change
    block = shapes.pop("block_kv", None)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        splitkv_attention(
            **tensors, context=SplitKVContext(layout=layout, transport=None),
            block_kv=None if block is None else (torch.zeros(block), torch.zeros(block)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 2, 16), (8, 2, 12)), "block_kv: k has shape (7, 2, 16), needs (8, 2, 16)"),
        (((9, 2, 16), (9, 2, 12)), "block_kv: k has shape (9, 2, 16), needs (8, 2, 16)"),
        (((8, 2, 16), (8, 1, 12)), "block_kv: v has shape (8, 1, 12), needs (8, 2, 12)"),
        (((8, 2, 16), (8, 2, 16)), "block_kv: v has shape (8, 2, 16), needs (8, 2, 12)"),
        (None, "block_kv must be given exactly when the layout has anchors (anchors: True"),
    ],
)
def test_own_blocks_that_do_not_fit_are_refused(shapes, message):
    layout = build_layout(make_plan([6], 1, queries=Anchors(((2, 5),), 4)), 0)
    with pytest.raises(ValueError, match=re.escape(message)):
        splitkv_attention(
            torch.zeros(8, 4, 16), torch.zeros(6, 2, 16), torch.zeros(6, 2, 12),
            SplitKVContext(layout=layout, transport=None),
            block_kv=None if shapes is None else tuple(map(torch.zeros, shapes)),
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), ()])
def test_a_sink_that_does_not_fit_is_refused(shape):
    layout = build_layout(make_plan([8], 1), 0)
    context = SplitKVContext(layout=layout, transport=None)
    message = f"sink has shape {shape}, needs [4]: one logit for each query head"
    with pytest.raises(ValueError, match=re.escape(message)):
        splitkv_attention(*torch.zeros(3, 8, 4, 16), context, sink=torch.zeros(shape))


def test_second_derivatives_are_refused():
    layout = build_layout(make_plan([8], 1), 0)
    q, k, v = (torch.randn(8, 2, 4, requires_grad=True) for _ in range(3))
    out, _ = splitkv_attention(q, k, v, SplitKVContext(layout=layout, transport=None))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("float64",) * 3, "q has dtype torch.float64, needs that of q: float32, bfloat16 or"),
        (("bfloat16", "float32", "bfloat16"), "k has dtype torch.float32, needs that of q"),
        (("bfloat16", "bfloat16", "float32"), "v has dtype torch.float32, needs that of q"),
    ],
)
def test_dtypes_are_refused_before_a_row_travels(dtypes, message):
    layout = build_layout(make_plan([8], 2, block_size=2), 0)
    q, k, v = (torch.zeros(4, 2, 16, dtype=getattr(torch, name)) for name in dtypes)
    context = SplitKVContext(layout=layout, transport=Untouched())
    with pytest.raises(ValueError, match=re.escape(message)):
        splitkv_attention(q, k, v, context)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_device_is_refused_before_a_row_travels(name):
    layout = build_layout(make_plan([8], 2, block_size=2), 0)
    tensors = {name: torch.zeros(4, 2, 16) for name in "qkv"}
    tensors[name] = tensors[name].to("meta")
    context = SplitKVContext(layout=layout, transport=Untouched())
    with pytest.raises(ValueError, match=f"{name} is on meta, needs cpu, where the layout is"):
        splitkv_attention(**tensors, context=context)


# Also where the own rows are among those of the only stage, and q only ever goes into packed rows.
@pytest.mark.parametrize("queries", [Causal(), Suffix(4)], ids=["staged", "joint"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_strided_last_dimensions_are_refused_before_a_row_travels(name, queries):
    layout = build_layout(make_plan([512], 2, queries=queries), 0)
    assert (layout.own is None) == (queries == Suffix(4))
    rows = {"q": layout.num_query_rows, "k": layout.num_kv_rows, "v": layout.num_kv_rows}
    tensors = {name: torch.zeros(num, 4, 16) for name, num in rows.items()}
    tensors[name] = forms_of(tensors[name])["last"]
    context = SplitKVContext(layout=layout, transport=Untouched())
    message = f"{name} has stride 4 in its last dimension, needs 1; pass {name}.contiguous()"
    with pytest.raises(ValueError, match=re.escape(message)):
        splitkv_attention(**tensors, context=context)


class Untouched:
    """A transport that nothing may reach."""

    rank, size = 0, 2

    def exchange(self, *_args):
        raise AssertionError("rows travelled")

    send_buffer = all_gather = exchange
