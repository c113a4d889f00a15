"""Summing partials: against sums in fp64, by hand, and what is refused."""

import pytest
import torch

from megatron_splitkv.ops import add_partials_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 17, 128, 300])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_random_sums(dim: int, dtype: torch.dtype, is_scaled: bool) -> None:
    """Ragged lists of slots, some empty, some shared by rows; a part in no list may hold NaN."""
    rows, num_parts, heads = 37, 50, 3
    generator = torch.Generator().manual_seed(dim)
    total = torch.randn((rows, heads, dim), generator=generator)
    parts = torch.randn((num_parts, heads, dim), generator=generator).to(dtype)
    scale = torch.rand((num_parts, heads), generator=generator) * 3 if is_scaled else None
    parts[-1] = torch.nan
    counts = torch.randint(0, 5, (rows,), generator=generator)
    ptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    slots = torch.randint(0, num_parts - 1, (int(counts.sum()),), generator=generator).int()
    expected = total.double()
    factors = torch.ones(num_parts, heads) if scale is None else scale
    owners = torch.repeat_interleave(torch.arange(rows), counts)
    expected.index_add_(0, owners, (parts.double() * factors.double()[..., None])[slots.long()])
    add_partials_(total, parts, ptr, slots, scale)
    torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=2e-6)


def test_the_order_is_that_of_the_slots() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, 1e8 - 1e8 + 1 is 1."""
    parts = torch.tensor([1.0, -1e8]).view(2, 1, 1)
    total = torch.full((2, 1, 1), 1e8)
    add_partials_(total, parts, torch.tensor([0, 2, 4]).int(), torch.tensor([0, 1, 1, 0]).int())
    assert total.flatten().tolist() == [0.0, 1.0]


def test_strided_tensors_and_rows_without_partials() -> None:
    storage = torch.full((2, 3, 9), 7.0)
    total = storage.transpose(0, 1)[..., 2:7]
    parts = torch.randn(2, 4, 11)[..., :5].transpose(0, 1)
    add_partials_(total, parts, torch.tensor([0, 1, 1, 2]).int(), torch.tensor([3, 0]).int())
    torch.testing.assert_close(total[0], parts[3] + 7)
    assert (total[1] == 7).all()
    torch.testing.assert_close(total[2], parts[0] + 7)
    assert (storage[..., :2] == 7).all() and (storage[..., 7:] == 7).all()
    add_partials_(total, parts[:0], torch.zeros(4).int(), torch.zeros(0).int())


@pytest.mark.parametrize(
    ("ptr", "slots", "message"),
    [
        ([0, 1, 2], [0, 3], r"part_slots\[1\]=3, needs 0 to 2"),
        ([0, 1, 3], [0, 1], r"part_ptr runs from 0 to 3, needs 0 to 2"),
        ([0, 3, 2], [0, 1], r"part_ptr decreases at row 1"),
        ([0, 2], [0, 1], r"part_ptr has shape \[2\], needs \[3\]"),
    ],
)
def test_bad_slots_are_refused(ptr: list[int], slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_partials_(
            torch.zeros(2, 1, 4), torch.zeros(3, 1, 4), torch.tensor(ptr).int(),
            torch.tensor(slots).int(),
        )  # fmt: skip


def test_a_scale_that_does_not_fit_is_refused() -> None:
    ptr, slots = torch.zeros(3).int(), torch.zeros(0).int()
    with pytest.raises(ValueError, match=r"part_scale has shape \[2, 1\], needs \[3, 1\]"):
        add_partials_(torch.zeros(2, 1, 4), torch.zeros(3, 1, 4), ptr, slots, torch.zeros(2, 1))


def test_registration() -> None:
    ptr, slots = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 1, 2]).int()
    torch.library.opcheck(
        torch.ops.megatron_splitkv.add_partials_.default,
        (torch.zeros(2, 1, 4), torch.ones(3, 1, 4), ptr, slots, torch.ones(3, 1)),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_start_from_zero_are_all_written(dtype: torch.dtype) -> None:
    """The bits of a sum into zeros, rounded at the end; a row without partials, too."""
    parts = torch.randn(5, 2, 17)
    ptr, slots = torch.tensor([0, 3, 3, 5]).int(), torch.tensor([0, 4, 1, 3, 2]).int()
    expected = torch.zeros(3, 2, 17)
    add_partials_(expected, parts, ptr, slots)
    total = torch.full((3, 2, 17), torch.nan, dtype=dtype)
    add_partials_(total, parts, ptr, slots, accumulate=False)
    assert torch.equal(total, expected.to(dtype))


def test_what_is_added_to_is_fp32() -> None:
    ptr, slots = torch.zeros(2).int(), torch.zeros(0).int()
    with pytest.raises(ValueError, match="total has dtype bfloat16, needs float32"):
        add_partials_(torch.zeros(1, 1, 4).bfloat16(), torch.zeros(0, 1, 4), ptr, slots)
