"""Merging partials, against hand-computed values and fp64."""

import math

import pytest
import torch
from torch import Tensor

from megatron_splitkv.ops import merge_partials_

EMPTY = -math.inf


def _merge_values(pairs: list[tuple[float, float]], dim: int = 20) -> tuple[float, Tensor]:
    """Merges (lse, out) pairs of one row; the first is the running result."""
    lses = torch.tensor([lse for lse, _ in pairs]).reshape(-1, 1)
    outs = torch.tensor([out for _, out in pairs]).reshape(-1, 1, 1).repeat(1, 1, dim)
    out, lse = outs[:1].clone(), lses[:1].clone()
    count = len(pairs) - 1
    slots = torch.arange(count, dtype=torch.int32)
    merge_partials_(out, lse, outs[1:], lses[1:], torch.tensor([0, count]).int(), slots)
    assert (out == out[0, 0, 0]).all() or out.isnan().all()
    return float(lse), out[0, 0]


def test_huge_difference_does_not_overflow() -> None:
    """log(1 + exp(200)) is infinite in fp32."""
    lse, out = _merge_values([(0.0, 1.0), (200.0, 3.0)])
    assert lse == 200.0
    assert (out == 3.0).all()


@pytest.mark.parametrize("is_running_empty", [True, False])
def test_empty_partial_leaves_the_other_bitwise(is_running_empty: bool) -> None:
    pairs = [(EMPTY, math.nan), (5.0, 0.1)]
    lse, out = _merge_values(pairs if is_running_empty else pairs[::-1])
    assert lse == 5.0
    assert (out == torch.tensor(0.1)).all()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_only_empty_partials_give_zero(count: int) -> None:
    lse, out = _merge_values([(EMPTY, math.nan)] * count)
    assert lse == EMPTY
    assert (out == 0.0).all()


@pytest.mark.parametrize(
    "lses", [(EMPTY, math.nan), (EMPTY, EMPTY, math.nan), (math.nan, EMPTY), (2.0, math.nan)]
)
def test_nan_is_not_taken_for_empty(lses: tuple[float, ...]) -> None:
    """A row that sees a key with NaN and lives on a rank without keys of its own."""
    lse, out = _merge_values([(lse, 1.0) for lse in lses])
    assert math.isnan(lse)
    assert out.isnan().all()


def test_very_negative_lse_is_not_taken_for_empty() -> None:
    """Weights must not be taken from the rounded lse: its unit is 0.0078 here."""
    lse, out = _merge_values([(-1e5, 1.0), (-1e5, 3.0)])
    assert lse == pytest.approx(-1e5 + math.log(2), abs=0.01)
    assert (out == 2.0).all()


@pytest.mark.parametrize("position", range(8))
def test_one_real_partial_of_eight_is_kept_bitwise(position: int) -> None:
    generator = torch.Generator().manual_seed(position)
    real = torch.randn((3, 2, 33), generator=generator)
    real[0, 0, 0] = -0.0
    real_lse = torch.randn((3, 2), generator=generator) * 50
    part_out = torch.full((8 * 3, 2, 33), torch.nan)
    part_lse = torch.full((8 * 3, 2), EMPTY)
    part_out[position * 3 : position * 3 + 3] = real
    part_lse[position * 3 : position * 3 + 3] = real_lse
    slots = (torch.arange(3)[:, None] + 3 * torch.arange(8)).flatten().int()
    out, lse = torch.full((3, 2, 33), torch.nan), torch.full((3, 2), EMPTY)
    merge_partials_(out, lse, part_out, part_lse, torch.arange(4).int() * 8, slots)
    assert torch.equal(out.view(torch.int32), real.view(torch.int32))
    assert torch.equal(lse, real_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 17, 128, 300])
def test_random_merge(dim: int, dtype: torch.dtype) -> None:
    """Ragged lists of slots, some empty, some shared by rows; heads merge independently."""
    rows, parts, heads = 37, 50, 3
    generator = torch.Generator().manual_seed(dim)
    out = torch.randn((rows, heads, dim), generator=generator)
    lse = torch.randn((rows, heads), generator=generator) * 3
    part_out = torch.randn((parts, heads, dim), generator=generator).to(dtype)
    part_lse = torch.randn((parts, heads), generator=generator) * 3
    for outs, lses, share in ((out, lse, 0.3), (part_out, part_lse, 0.3)):
        is_empty = torch.rand(lses.shape, generator=generator) < share
        lses.masked_fill_(is_empty, EMPTY)
        outs.masked_fill_(is_empty[..., None], torch.nan)
    counts = torch.randint(0, 5, (rows,), generator=generator)
    ptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    slots = torch.randint(0, parts, (int(counts.sum()),), generator=generator).int()

    lses = [torch.cat([lse[t][None], part_lse[_slots(t, ptr, slots)]]) for t in range(rows)]
    outs = [torch.cat([out[t][None], part_out[_slots(t, ptr, slots)].float()]) for t in range(rows)]
    expected_lse = torch.stack([torch.logsumexp(x.double(), dim=0) for x in lses])
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for t in range(rows):
        weights = torch.exp(lses[t].double() - expected_lse[t].clamp_min(-1e30))
        expected[t] = (weights[..., None] * outs[t].nan_to_num(0.0)).sum(dim=0)

    merge_partials_(out, lse, part_out, part_lse, ptr, slots)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def _slots(row: int, ptr: Tensor, slots: Tensor) -> Tensor:
    return slots[int(ptr[row]) : int(ptr[row + 1])].long()


def test_merge_in_two_calls_equals_one_call_within_rounding() -> None:
    """The running result is one more partial."""
    generator = torch.Generator().manual_seed(0)
    part_out = torch.randn((4, 2, 8), generator=generator)
    part_lse = torch.randn((4, 2), generator=generator)
    results: list[tuple[Tensor, Tensor]] = []
    for groups in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):
        out, lse = torch.full((1, 2, 8), torch.nan), torch.full((1, 2), EMPTY)
        for group in groups:
            ptr, slots = torch.tensor([0, len(group)]).int(), torch.tensor(group).int()
            merge_partials_(out, lse, part_out, part_lse, ptr, slots)
        results.append((out, lse))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_strided_tensors() -> None:
    generator = torch.Generator().manual_seed(1)
    part_out = torch.randn((6, 2, 5), generator=generator)
    part_lse = torch.randn((6, 2), generator=generator)
    ptr, slots = torch.tensor([0, 2, 6]).int(), torch.tensor([5, 0, 1, 2, 3, 4]).int()
    plain_out, plain_lse = torch.full((2, 2, 5), torch.nan), torch.full((2, 2), EMPTY)
    merge_partials_(plain_out, plain_lse, part_out, part_lse, ptr, slots)
    storage = torch.full((2, 2, 9), 7.0)
    out, lse = storage.transpose(0, 1)[..., 2:7], torch.full((2, 2), EMPTY).T
    wide = torch.zeros(2, 6, 11)[..., :5].transpose(0, 1)
    wide.copy_(part_out)
    merge_partials_(out, lse, wide, part_lse.T.contiguous().T, ptr, slots)
    assert torch.equal(out, plain_out)
    assert torch.equal(lse, plain_lse)
    assert (storage[..., :2] == 7.0).all() and (storage[..., 7:] == 7.0).all()


def test_no_rows_and_no_partials() -> None:
    ptr, slots = torch.zeros(1).int(), torch.zeros(0).int()
    out, lse = torch.zeros(0, 2, 4), torch.zeros(0, 2)
    merge_partials_(out, lse, torch.zeros(0, 2, 4), torch.zeros(0, 2), ptr, slots)
    out, lse = torch.full((1, 1, 4), 3.0), torch.full((1, 1), 2.0)
    merge_partials_(out, lse, torch.zeros(0, 1, 4), torch.zeros(0, 1), torch.zeros(2).int(), slots)
    assert (out == 3.0).all() and lse.item() == 2.0


@pytest.mark.parametrize(
    ("ptr", "slots", "message"),
    [
        ([0, 1, 2], [0, 3], r"part_slots\[1\]=3, needs 0 to 2"),
        ([0, 1, 2], [-1, 0], r"part_slots\[0\]=-1, needs 0 to 2"),
        ([0, 1, 3], [0, 1], r"part_ptr runs from 0 to 3, needs 0 to 2"),
        ([1, 1, 2], [0, 1], r"part_ptr runs from 1 to 2, needs 0 to 2"),
        ([0, 3, 2], [0, 1], r"part_ptr decreases at row 1"),
        ([0, 2], [0, 1], r"part_ptr has shape \[2\], needs \[3\]"),
    ],
)
def test_bad_slots_are_refused(ptr: list[int], slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_partials_(
            torch.zeros(2, 1, 4),
            torch.zeros(2, 1),
            torch.zeros(3, 1, 4),
            torch.zeros(3, 1),
            torch.tensor(ptr).int(),
            torch.tensor(slots).int(),
        )


def test_registration() -> None:
    torch.library.opcheck(
        torch.ops.megatron_splitkv.merge_partials_.default,
        (
            torch.zeros(2, 1, 4),
            torch.zeros(2, 1),
            torch.ones(3, 1, 4),
            torch.zeros(3, 1),
            torch.tensor([0, 1, 3]).int(),
            torch.tensor([0, 1, 2]).int(),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_scaled_partials_equal_their_products() -> None:
    """fp16 with a factor for each row and head, as `encode_partials_` makes; empty: NaN."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn((6, 2, 17), generator=generator).half()
    scale = torch.rand((6, 2), generator=generator) * 100
    part_lse = torch.randn((6, 2), generator=generator)
    values[3, 0], scale[3, 0], part_lse[3, 0] = torch.nan, torch.nan, EMPTY
    ptr, slots = torch.tensor([0, 2, 6]).int(), torch.tensor([5, 0, 1, 2, 3, 4]).int()
    results: list[tuple[Tensor, Tensor]] = []
    for part_out, factor in ((values, scale), (values.float() * scale[..., None], None)):
        out, lse = torch.ones(2, 2, 17), torch.zeros(2, 2)
        merge_partials_(out, lse, part_out, part_lse, ptr, slots, factor)
        results.append((out, lse))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-5)


def test_a_scale_of_another_shape_is_refused() -> None:
    ptr, slots = torch.zeros(2).int(), torch.zeros(0).int()
    with pytest.raises(ValueError, match=r"part_scale has shape \[2, 1\], needs \[3, 1\]"):
        merge_partials_(
            torch.zeros(1, 1, 4), torch.zeros(1, 1), torch.zeros(3, 1, 4), torch.zeros(3, 1), ptr,
            slots, torch.zeros(2, 1),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_running_result_all_is_written(dtype: torch.dtype) -> None:
    """The bits of a merge into an empty result, rounded at the end; a row without partials, too."""
    generator = torch.Generator().manual_seed(3)
    part_out = torch.randn((5, 2, 17), generator=generator)
    part_lse = torch.randn((5, 2), generator=generator)
    part_lse[3], part_out[3] = EMPTY, torch.nan
    ptr, slots = torch.tensor([0, 3, 3, 4, 5]).int(), torch.tensor([0, 4, 1, 3, 2]).int()
    expected, expected_lse = torch.zeros(4, 2, 17), torch.full((4, 2), EMPTY)
    merge_partials_(expected, expected_lse, part_out, part_lse, ptr, slots)
    for rubbish in (torch.nan, 5.0):
        out, lse = torch.full((4, 2, 17), rubbish, dtype=dtype), torch.full((4, 2), rubbish)
        merge_partials_(out, lse, part_out, part_lse, ptr, slots, accumulate=False)
        assert torch.equal(out, expected.to(dtype))
        assert torch.equal(lse, expected_lse)


def test_a_running_result_is_fp32() -> None:
    ptr, slots = torch.zeros(2).int(), torch.zeros(0).int()
    parts, lses = torch.zeros(0, 1, 4), torch.zeros(0, 1)
    with pytest.raises(ValueError, match="out has dtype bfloat16, needs float32"):
        merge_partials_(torch.zeros(1, 1, 4).bfloat16(), torch.zeros(1, 1), parts, lses, ptr, slots)
