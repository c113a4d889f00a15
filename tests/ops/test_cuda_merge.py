"""Merge, sum and wire format of partials, and delta, on a GPU against the CPU kernels."""

import pytest
import torch

from megatron_splitkv.ops import add_partials_, encode_partials_, merge_partials_
from megatron_splitkv.ops.delta import attention_delta

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 33, 64, 128, 192, 512])
@pytest.mark.parametrize("max_parts", [1, 8, 70])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_merge_equals_the_cpu(
    is_scaled: bool, max_parts: int, dim: int, dtype: torch.dtype
) -> None:
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
    scale = torch.rand((num_slots, heads), generator=generator) * 3 if is_scaled else None
    arguments = (part_out, part_lse, ptr, slots, scale)
    cuda_out, cuda_lse = out.cuda(), lse.cuda()
    merge_partials_(out, lse, *arguments)
    merge_partials_(cuda_out, cuda_lse, *(None if x is None else x.cuda() for x in arguments))
    torch.testing.assert_close(cuda_out.cpu(), out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(cuda_lse.cpu(), lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 64, 128])
def test_what_need_not_accumulate_equals_the_cpu(
    dim: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Every row is written, in the dtype of the result: a merge, and a sum."""
    generator = torch.Generator().manual_seed(dim)
    part_out = torch.randn((9, 3, dim), generator=generator).to(dtype)
    part_lse = torch.randn((9, 3), generator=generator)
    part_lse[4], part_out[4] = -torch.inf, 0.0
    scale = torch.rand((9, 3), generator=generator)
    ptr, slots = torch.tensor([0, 4, 4, 5, 6]).int(), torch.tensor([0, 4, 1, 8, 4, 2]).int()
    results = []
    for device in ("cpu", "cuda"):
        out = torch.full((4, 3, dim), torch.nan, dtype=out_dtype, device=device)
        lse, total = torch.full((4, 3), torch.nan, device=device), out.clone()
        lists = (ptr.to(device), slots.to(device), scale.to(device))
        values = part_out.to(device)
        merge_partials_(out, lse, values, part_lse.to(device), *lists, accumulate=False)
        add_partials_(total, values, *lists, accumulate=False)
        results.append((out.cpu(), lse.cpu(), total.cpu()))
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[out_dtype]
    torch.testing.assert_close(results[1], results[0], rtol=rounding, atol=2e-6)
    assert (results[1][1][[1, 2]] == -torch.inf).all() and not results[1][0][[1, 2]].any()


def test_row_without_partials_keeps_its_bits() -> None:
    """It is not even written; but an empty one is cleared, and NaN in its lse makes it NaN."""
    out, lse = torch.ones(3, 2, 128, device="cuda"), torch.randn(3, 2, device="cuda")
    lse[1], lse[2] = -torch.inf, torch.nan
    out[0, 0, 0], out[1] = -0.0, torch.nan
    before = out[0].clone(), lse[0].clone()
    none = torch.zeros(4, dtype=torch.int32, device="cuda")
    part_out, part_lse = torch.ones(1, 2, 128, device="cuda"), torch.ones(1, 2, device="cuda")
    merge_partials_(out, lse, part_out, part_lse, none, none[:0])
    assert torch.equal(out[0].view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(lse[0], before[1])
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert out[2].isnan().all() and lse[2].isnan().all()


def test_nan_is_not_taken_for_empty() -> None:
    """Rows: NaN beside an empty running result, NaN after 8 empty partials, nothing at all."""
    counts = torch.tensor([0, 1, 10, 12])
    part_lse = torch.full((12, 1), -torch.inf)
    part_lse[[0, 9]] = torch.nan
    out, lse = torch.ones(3, 1, 8, device="cuda"), torch.full((3, 1), -torch.inf, device="cuda")
    slots = torch.arange(12, dtype=torch.int32).cuda()
    merge_partials_(
        out, lse, torch.ones(12, 1, 8).cuda(), part_lse.cuda(), counts.int().cuda(), slots
    )
    assert lse[:2].isnan().all() and out[:2].isnan().all()
    assert lse[2] == -torch.inf and (out[2] == 0).all()


def test_single_partial_is_kept_bitwise() -> None:
    out = torch.full((5, 2, 128), torch.nan, device="cuda")
    lse = torch.full((5, 2), -torch.inf, device="cuda")
    part_out = torch.randn(5, 2, 128, device="cuda")
    part_lse = torch.randn(5, 2, device="cuda") * 50
    each = torch.arange(6, dtype=torch.int32, device="cuda")
    merge_partials_(out, lse, part_out, part_lse, each, each[:-1])
    assert torch.equal(out, part_out)
    assert torch.equal(lse, part_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 33, 64, 128, 192, 512])
@pytest.mark.parametrize("max_parts", [1, 8, 70])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_add_equals_the_cpu(is_scaled: bool, max_parts: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(max_parts + dim)
    rows, heads, num_slots = 37, 3, 90
    counts = torch.randint(0, max_parts + 1, (rows,), generator=generator)
    ptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    slots = torch.randint(0, num_slots, (int(ptr[-1]),), generator=generator).int()
    parts = torch.randn((num_slots, heads, dim), generator=generator).to(dtype)
    scale = torch.rand((num_slots, heads), generator=generator) * 3 if is_scaled else None
    total = torch.randn((rows, heads, dim), generator=generator)
    on_cuda = total.cuda()
    arguments = (parts, ptr, slots, scale)
    add_partials_(total, *arguments)
    add_partials_(on_cuda, *(None if x is None else x.cuda() for x in arguments))
    torch.testing.assert_close(on_cuda.cpu(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 33, 64, 128, 132, 192, 256, 512])
@pytest.mark.parametrize("num_rows", [0, 1, 1001])
def test_encode_gives_the_bits_of_the_cpu(num_rows: int, dim: int) -> None:
    """Into packed rows that leave a gap; NaN, infinity and zeros in heads of their own."""
    generator = torch.Generator().manual_seed(dim)
    values = torch.randn(num_rows, 3, dim, generator=generator) * 1e3
    values *= torch.logspace(0, -8, dim)
    values[::7, 0] = 0.0
    values[::11, 1, dim // 2] = torch.nan
    values[::13, 2, -1] = -torch.inf
    encoded = torch.empty(num_rows, 3, dim, dtype=torch.float16)
    scale = torch.empty(num_rows, 3)
    encode_partials_(encoded, scale, values)
    packed = torch.full((num_rows, 3 * dim + 8), 7.0, dtype=torch.float16, device="cuda")
    beside = torch.full((num_rows, 8), 7.0, device="cuda")
    encode_partials_(packed[:, : 3 * dim].view(num_rows, 3, dim), beside[:, 1:4], values.cuda())
    got = packed[:, : 3 * dim].reshape(num_rows, 3, dim).cpu()
    torch.testing.assert_close(got, encoded, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(beside[:, 1:4].cpu(), scale, rtol=0, atol=0, equal_nan=True)
    lse = torch.randn(num_rows, 3, generator=generator)
    encode_partials_(
        packed[:, : 3 * dim].view(num_rows, 3, dim), beside[:, 1:4], values.cuda(),
        beside[:, 5:8], lse.cuda(),
    )  # fmt: skip
    assert torch.equal(beside[:, 5:8].cpu(), lse)
    assert torch.equal(packed[:, : 3 * dim].reshape(num_rows, 3, dim).cpu().isnan(), got.isnan())
    assert (packed[:, 3 * dim :] == 7).all()
    assert (beside[:, [0, 4]] == 7).all()


@pytest.mark.parametrize("dim", [1, 33, 64, 128, 132, 192, 256, 512])
@pytest.mark.parametrize("num_rows", [0, 1, 1001])
def test_encode_of_chosen_rows_gives_the_bits_of_the_cpu(num_rows: int, dim: int) -> None:
    """Some rows often, some never, from heads of more; with and without lse, into packed rows."""
    generator = torch.Generator().manual_seed(dim)
    values = torch.randn(70, 5, dim, generator=generator) * torch.logspace(3, -5, dim)
    values[::7, 1], values[::11, 2, dim // 2] = 0.0, torch.nan
    lse = torch.randn(70, 5, generator=generator)
    values, lse = values[:, 1:4], lse[:, 1:4]
    rows = torch.randint(0, 70, (num_rows,), generator=generator)
    encoded = torch.empty(num_rows, 3, dim, dtype=torch.float16)
    scale, sent = torch.empty(num_rows, 3), torch.empty(num_rows, 3)
    encode_partials_(encoded, scale, values, sent, lse, rows)
    on_cuda = (values.cuda(), lse.cuda(), rows.cuda())
    for has_lse in (False, True):
        packed = torch.full((num_rows, 3 * dim + 8), 7.0, dtype=torch.float16, device="cuda")
        beside = torch.full((num_rows, 8), 7.0, device="cuda")
        with_lse = (beside[:, 5:8], on_cuda[1]) if has_lse else (None, None)
        target = packed[:, : 3 * dim].view(num_rows, 3, dim)
        encode_partials_(target, beside[:, 1:4], on_cuda[0], *with_lse, on_cuda[2])
        torch.testing.assert_close(target.cpu(), encoded, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(beside[:, 1:4].cpu(), scale, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(beside[:, 5:8].cpu(), sent if has_lse else torch.full_like(sent, 7.0))
        assert (packed[:, 3 * dim :] == 7).all()
        assert (beside[:, [0, 4]] == 7).all()


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
