"""The attention function on a GPU, with one rank, against the fp64 result."""

import pytest
import torch

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Window, make_plan
from tests import tolerances
from tests.oracle import assert_lse_matches, assert_matches, attend, mask_from_intervals

pytestmark = pytest.mark.gpu

DOCS = [700, 1, 0, 130, 64, 1000]


@pytest.mark.parametrize("queries", [Causal(), Window(200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_equals_dense_attention(queries, dtype):
    layout = build_layout(make_plan(DOCS, 1, queries=queries), 0)
    rows = layout.num_kv_rows
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((rows, heads, 128), generator=generator).to(dtype) for heads in (8, 2, 2)
    )
    mask = mask_from_intervals(layout.own.begin, layout.own.end, rows)
    expected = attend(q, k, v, mask, softmax_scale=128**-0.5)
    context = SplitKVContext(layout=layout.to("cuda"), transport=None)
    for _ in range(2):  # the second layer finds its work list
        with torch.no_grad():
            out, lse = splitkv_attention(q.cuda(), k.cuda(), v.cuda(), context)
        assert_matches("out", out, expected.out, tolerances.cuda_forward(dtype, out.dtype))
        assert_lse_matches(lse, expected.lse, tolerances.CUDA_LSE_ABS)


@pytest.mark.parametrize("queries", [Causal(), Window(200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_equal_those_of_dense_attention(queries, dtype):
    layout = build_layout(make_plan(DOCS, 1, queries=queries), 0)
    rows = layout.num_kv_rows
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn((rows, heads, 128), generator=generator).to(dtype) for heads in (8, 2, 2, 8)
    )
    mask = mask_from_intervals(layout.own.begin, layout.own.end, rows)
    expected = attend(q, k, v, mask, softmax_scale=128**-0.5, dout=dout)
    context = SplitKVContext(layout=layout.to("cuda"), transport=None)
    for _ in range(2):
        leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
        out, _ = splitkv_attention(*leaves, context)
        gradients = torch.autograd.grad(out, leaves, dout.cuda().to(out.dtype))
        tolerance = tolerances.GRADIENT_BY_DTYPE[dtype]
        for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_matches(name, got, getattr(expected, name), tolerance)
