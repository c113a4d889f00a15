"""Merge and delta on a GPU against the CPU kernels."""

import pytest
import torch

from megatron_splitkv.ops import merge_partials_
from megatron_splitkv.ops.delta import attention_delta

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 33, 64, 128, 192, 512])
@pytest.mark.parametrize("max_parts", [1, 8, 70])
def test_merge_equals_the_cpu(max_parts: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(max_parts + dim)
    rows, heads, num_slots = 37, 3, 90
    counts = torch.randint(0, max_parts + 1, (rows,), generator=generator)
    ptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    slots = torch.randint(0, num_slots, (int(ptr[-1]),), generator=generator).int()
    part_out = torch.randn((num_slots, heads, dim), generator=generator).to(dtype)
    part_lse = torch.randn((num_slots, heads), generator=generator) * 20
    is_empty = torch.rand((num_slots, heads), generator=generator) < 0.3
    part_lse[is_empty] = -torch.inf
    part_out[is_empty] = torch.nan
    out = torch.randn((rows, heads, dim), generator=generator)
    lse = torch.randn((rows, heads), generator=generator) * 20
    lse[::3] = -torch.inf
    out[::3] = torch.nan
    arguments = (part_out, part_lse, ptr, slots)
    cuda_out, cuda_lse = out.cuda(), lse.cuda()
    merge_partials_(out, lse, *arguments)
    merge_partials_(cuda_out, cuda_lse, *(x.cuda() for x in arguments))
    torch.testing.assert_close(cuda_out.cpu(), out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(cuda_lse.cpu(), lse, rtol=1e-6, atol=2e-6)


def test_single_partial_is_kept_bitwise() -> None:
    out = torch.full((5, 2, 128), torch.nan, device="cuda")
    lse = torch.full((5, 2), -torch.inf, device="cuda")
    part_out = torch.randn(5, 2, 128, device="cuda")
    part_lse = torch.randn(5, 2, device="cuda") * 50
    each = torch.arange(6, dtype=torch.int32, device="cuda")
    merge_partials_(out, lse, part_out, part_lse, each, each[:-1])
    assert torch.equal(out, part_out)
    assert torch.equal(lse, part_lse)


PAIRS = [(a, b) for a in DTYPES for b in DTYPES if a == b or torch.float32 in (a, b)]


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
@pytest.mark.parametrize("dim", [1, 33, 64, 128, 192])
def test_delta_equals_the_cpu(dim: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    dout = torch.randn(41, 3, dim).to(dtype)
    out = torch.randn(41, 3, dim).to(out_dtype)
    delta = attention_delta(dout.cuda(), out.cuda())
    torch.testing.assert_close(delta.cpu(), attention_delta(dout, out), rtol=1e-5, atol=1e-5)


def test_delta_of_an_expanded_gradient() -> None:
    dout = torch.ones(1, 1, 1, device="cuda").expand(9, 2, 128)
    out = torch.randn(9, 2, 128, device="cuda")
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    torch.testing.assert_close(attention_delta(dout, out), out.sum(-1), rtol=1e-5, atol=1e-5)
