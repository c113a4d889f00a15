"""The wire format of partials: what it loses, at the ends of its range and in packed rows."""

import math

import pytest
import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import encode_partials_

ISAS = _kernels.cpu_isas().split()


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    encoded = torch.empty(values.shape, dtype=torch.float16)
    scale = torch.empty(values.shape[:2])
    encode_partials_(encoded, scale, values)
    return encoded, scale


def decode(encoded: Tensor, scale: Tensor) -> Tensor:
    return encoded.double() * scale.double()[..., None]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [1, 2, 15, 64, 128, 129, 512])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-8, 1.0, 3e5, 1e38])
def test_loses_at_most_a_rounding(dim: int, magnitude: float, isa: str, restored_isa: None) -> None:
    _kernels.force_cpu_isa(isa)
    generator = torch.Generator().manual_seed(dim)
    values = torch.rand(5, 3, dim, generator=generator) * 2 - 1
    values = values * torch.logspace(0, -9, dim) * magnitude
    encoded, scale = encode(values)
    assert torch.equal(scale, values.abs().amax(-1))
    assert (encoded.abs().amax(-1) == 1).all()
    exact = values.double()
    bound = torch.maximum(exact.abs() * 2.0**-11, scale.double()[..., None] * 2.0**-25) * 1.0001
    assert ((decode(encoded, scale) - exact).abs() <= bound).all()


def test_zeros_have_scale_zero_and_signs_are_kept() -> None:
    encoded, scale = encode(torch.tensor([0.0, -0.0, 0.0, -3.0, 1.5, -0.0]).view(2, 1, 3))
    assert scale.tolist() == [[0.0], [3.0]]
    assert encoded.flatten().tolist() == [0.0, 0.0, 0.0, -1.0, 0.5, 0.0]
    assert torch.signbit(encoded.flatten()).tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 7, 16])
def test_what_is_not_finite_stays_so(bad: float, column: int) -> None:
    """And in its own row and head alone."""
    values = torch.randn(2, 2, 17)
    values[1, 0, column] = bad
    decoded = decode(*encode(values))
    assert not decoded[1, 0, column].isfinite()
    decoded[1, 0], values[1, 0] = 0.0, 0.0
    torch.testing.assert_close(decoded, values.double(), rtol=2e-3, atol=1e-6)


def test_targets_may_lie_in_packed_rows() -> None:
    values = torch.randn(3, 6, 5).transpose(0, 1)
    plain, scale = encode(values.contiguous())
    storage = torch.full((6, 40), 7.0, dtype=torch.float16)
    encoded = storage[:, 8:23].view(6, 3, 5)
    beside = torch.full((6, 9), 7.0)
    encode_partials_(encoded, beside[:, 2:5], values)
    assert torch.equal(encoded, plain)
    assert torch.equal(beside[:, 2:5], scale)
    assert (storage[:, :8] == 7).all() and (storage[:, 23:] == 7).all()
    assert (beside[:, :2] == 7).all() and (beside[:, 5:] == 7).all()


def test_log_sum_exps_ride_along() -> None:
    values, lse = torch.randn(4, 3, 5), torch.randn(3, 4).T
    lse[2, 1] = -torch.inf
    plain, plain_scale = encode(values)
    encoded, beside = torch.empty(4, 3, 5, dtype=torch.float16), torch.full((4, 8), 7.0)
    encode_partials_(encoded, beside[:, :3], values, beside[:, 4:7], lse)
    assert torch.equal(encoded, plain)
    assert torch.equal(beside[:, :3], plain_scale)
    assert torch.equal(beside[:, 4:7], lse)
    assert (beside[:, [3, 7]] == 7).all()


def test_no_rows() -> None:
    encode(torch.zeros(0, 2, 8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("chosen", [[3, 0, 3, 5, 1], [5, 4, 3, 2, 1, 0], [2], []], ids=str)
def test_rows_are_taken_by_index(chosen: list[int], isa: str, restored_isa: None) -> None:
    """Any order, some often, some never; with and without their lse; into packed rows."""
    _kernels.force_cpu_isa(isa)
    generator = torch.Generator().manual_seed(len(chosen))
    values = torch.randn(3, 6, 17, generator=generator).transpose(0, 1)
    lse = torch.randn(3, 6, generator=generator).T
    rows, num_rows = torch.tensor(chosen, dtype=torch.int64), len(chosen)
    plain, plain_scale = encode(values[rows])
    for has_lse in (False, True):
        storage = torch.full((num_rows, 60), 7.0, dtype=torch.float16)
        encoded, beside = storage[:, 4:55].view(num_rows, 3, 17), torch.full((num_rows, 8), 7.0)
        with_lse = (beside[:, 4:7], lse) if has_lse else (None, None)
        encode_partials_(encoded, beside[:, :3], values, *with_lse, rows)
        assert torch.equal(encoded, plain)
        assert torch.equal(beside[:, :3], plain_scale)
        assert torch.equal(beside[:, 4:7], lse[rows] if has_lse else torch.full((num_rows, 3), 7.0))
        assert (storage[:, :4] == 7).all() and (storage[:, 55:] == 7).all()
        assert (beside[:, [3, 7]] == 7).all()


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_index_out_of_range_is_refused(bad: int) -> None:
    rows = torch.tensor([0, 3, bad])
    encoded, scale = torch.empty(3, 2, 8, dtype=torch.float16), torch.empty(3, 2)
    with pytest.raises(ValueError, match=rf"rows\[2\]={bad}, needs 0 to 3"):
        encode_partials_(encoded, scale, torch.zeros(4, 2, 8), rows=rows)


def test_rows_of_another_kind_are_refused() -> None:
    values, rows = torch.zeros(4, 2, 8), torch.tensor([0, 3])
    encoded, scale = torch.empty(2, 2, 8, dtype=torch.float16), torch.empty(2, 2)
    with pytest.raises(ValueError, match=r"rows has dtype int32, needs int64"):
        encode_partials_(encoded, scale, values, rows=rows.int())
    with pytest.raises(ValueError, match=r"encoded has shape \[2, 2, 8\], needs \[1, 2, 8\]"):
        encode_partials_(encoded, scale, values, rows=rows[:1])
    with pytest.raises(ValueError, match=r"sent_lse has shape \[4, 2\], needs \[2, 2\]"):
        encode_partials_(encoded, scale, values, torch.zeros(4, 2), torch.zeros(4, 2), rows)
    with pytest.raises(ValueError, match=r"lse has shape \[2, 2\], needs \[4, 2\]"):
        encode_partials_(encoded, scale, values, torch.zeros(2, 2), torch.zeros(2, 2), rows)


def test_refusals() -> None:
    values = torch.zeros(2, 3, 8)
    half, scale = values.half(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"encoded has dtype bfloat16, needs float16"):
        encode_partials_(values.bfloat16(), scale, values)
    with pytest.raises(ValueError, match=r"scale has shape \[3, 2\], needs \[2, 3\]"):
        encode_partials_(half, scale.T, values)
    with pytest.raises(ValueError, match=r"values has dtype float16, needs float32"):
        encode_partials_(half, scale, half)
    with pytest.raises(ValueError, match=r"encode_partials_ got values with requires_grad=True"):
        encode_partials_(half, scale, values.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"sent_lse and lse go together; give both or none"):
        encode_partials_(half, scale, values, scale)
    with pytest.raises(ValueError, match=r"sent_lse has shape \[3, 2\], needs \[2, 3\]"):
        encode_partials_(half, scale, values, scale.T, scale)
    wide = torch.zeros(2, 3, 513)
    with pytest.raises(ValueError, match=r"values has head_dim 513, needs 1 to 512"):
        encode_partials_(wide.half(), scale, wide)


@pytest.mark.parametrize("rows", [None, [1, 1, 0]])
def test_registration(rows: list[int] | None) -> None:
    num_rows = len(rows or range(2))
    torch.library.opcheck(
        torch.ops.megatron_splitkv.encode_partials_.default,
        (
            torch.zeros(num_rows, 1, 4).half(),
            torch.zeros(num_rows, 1),
            torch.ones(2, 1, 4),
            torch.zeros(num_rows, 1),
            torch.ones(2, 1),
            None if rows is None else torch.tensor(rows),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
