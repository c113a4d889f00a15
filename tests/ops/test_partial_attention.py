"""Forward and backward of partial attention against the fp64 oracle."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_splitkv.ops import merge_partials_, partial_attention, partial_attention_backward
from tests import tolerances
from tests.ops.cases import INTERVALS, Case, Shape, check_backward, check_forward, make_case
from tests.oracle import assert_lse_matches, assert_matches, attend, mask_from_documents

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The kernels work in tiles of 64 rows and 128 keys.
ROW_SIZES = [0, 1, 63, 64, 65, 131]
KEY_SIZES = [0, 1, 127, 128, 129, 257]


@pytest.mark.parametrize("keys", KEY_SIZES)
@pytest.mark.parametrize("rows", ROW_SIZES)
def test_sizes_around_a_tile(rows: int, keys: int) -> None:
    for intervals in ("random", "full"):
        case = make_case(Shape(rows=rows, keys=keys), intervals=intervals)
        check_forward(case)
        check_backward(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intervals", INTERVALS)
def test_intervals(intervals: str, dtype: torch.dtype) -> None:
    shape = Shape(rows=200, keys=300, heads_q=4, heads_kv=2)
    case = make_case(shape, intervals=intervals, dtype=dtype)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1), (8, 1), (5, 1), (8, 2), (6, 2), (4, 4)])
def test_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(Shape(heads_q=heads[0], heads_kv=heads[1]), dtype=dtype, seed=1)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims",
    [(128, 128), (64, 32), (192, 128), (1, 1), (1, 7), (5, 3), (80, 80), (96, 17), (512, 509)],
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(Shape(rows=33, dim_qk=dims[0], dim_v=dims[1]), dtype=dtype, seed=2)
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtypes(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    check_forward(make_case(Shape(), dtype=dtype, seed=3), out_dtype)


def test_output_is_rounded_to_nearest() -> None:
    case = make_case(Shape(), seed=3)
    exact, _ = case.forward()
    for dtype in (torch.bfloat16, torch.float16):
        rounded, _ = case.forward(dtype)
        assert torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("value", [0.0, 3e-8, -4.5e-6, 7e4, -1e9, torch.inf, torch.nan])
def test_conversions_of_special_values(value: float) -> None:
    """With one visible key the output is v itself: subnormal, overflowing and infinite values."""
    key = torch.tensor([0, 0], dtype=torch.int32)
    q = torch.ones(2, 1, 4)
    for dtype in (torch.bfloat16, torch.float16):
        v = torch.full((1, 1, 4), value).to(dtype)
        for inputs in ((q, q[:1], v.float()), (q.to(dtype), q[:1].to(dtype), v)):
            for out_dtype in DTYPES:
                out, _ = partial_attention(
                    *inputs, key, key + 1, softmax_scale=1.0, out_dtype=out_dtype
                )
                expected = v.to(out_dtype).expand(2, 1, 4)
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_output_ties_round_to_even() -> None:
    """Halfway cases that random values never hit, as unrounded fp32 values of one visible key."""
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        halves = torch.tensor([1.0, 3.0, 5.0, -1.0, -3.0]) * 2.0**-bits
        v = (torch.sign(halves) + halves).reshape(1, 1, -1)
        key = torch.zeros(1, dtype=torch.int32)
        q = torch.ones(1, 1, 4)
        out, _ = partial_attention(q, q, v, key, key + 1, softmax_scale=1.0, out_dtype=dtype)
        assert torch.equal(out, v.to(dtype))


def test_exponential_is_accurate() -> None:
    """With one key, lse = 0 and dout = 1, backward gives dv = exp(score) itself."""
    scores = torch.linspace(-2.0, 2.0, 4001)
    keys = torch.arange(4001, dtype=torch.int32)
    ones, zeros = torch.ones(4001, 1, 1), torch.zeros(4001, 1)
    dk, dv = torch.zeros(4001, 1, 1), torch.zeros(4001, 1, 1)
    partial_attention_backward(
        ones,
        scores[:, None, None],
        ones,
        ones,
        zeros,
        zeros,
        keys,
        keys + 1,
        dk,
        dv,
        softmax_scale=1.0,
    )
    expected = torch.exp(scores.double())
    # Two roundings of a base-2 exponent below 3 (2e-7 each, times ln 2) and the polynomial.
    assert float((dv[:, 0, 0].double() / expected - 1.0).abs().max()) < 5e-7


def _with_strides(tensor: Tensor, head_gap: int, is_head_major: bool) -> Tensor:
    """The same values with gaps between heads, stored rows first or heads first."""
    rows, heads, dim = tensor.shape
    shape = (heads, rows, dim + head_gap) if is_head_major else (rows, heads, dim + head_gap)
    storage = torch.full(shape, torch.nan, dtype=tensor.dtype)
    view = (storage.transpose(0, 1) if is_head_major else storage)[..., :dim]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("is_head_major", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype, is_head_major: bool) -> None:
    plain = make_case(Shape(heads_q=4, heads_kv=2, dim_v=24), dtype=dtype, seed=4)
    strided = dataclasses.replace(
        plain,
        q=_with_strides(plain.q, 3, is_head_major),
        k=_with_strides(plain.k, 5, is_head_major),
        v=_with_strides(plain.v, 1, is_head_major),
        dout=_with_strides(plain.dout, 7, is_head_major),
    )
    out, lse = plain.forward()
    strided_out, strided_lse = strided.forward()
    assert torch.equal(out, strided_out)
    assert torch.equal(lse, strided_lse)
    delta = plain.delta(out)
    dq, dk, dv = plain.backward(lse, delta)
    strided_dk = _with_strides(torch.zeros(plain.k.shape), 2, is_head_major)
    strided_dv = _with_strides(torch.zeros(plain.v.shape), 6, is_head_major)
    strided_dq = strided.backward_into(
        lse.T.contiguous().T, delta.T.contiguous().T, strided_dk, strided_dv
    )
    assert torch.equal(dq, strided_dq)
    assert torch.equal(dk, strided_dk)
    assert torch.equal(dv, strided_dv)


def test_packed_causal_documents_match_the_document_mask() -> None:
    doc_lens = [1, 7, 96, 3, 130, 64]
    ends = torch.tensor(doc_lens).cumsum(0)
    begin = torch.repeat_interleave(ends - torch.tensor(doc_lens), torch.tensor(doc_lens)).int()
    end = torch.arange(1, int(ends[-1]) + 1, dtype=torch.int32)
    tokens = len(end)
    case = make_case(Shape(rows=tokens, keys=tokens), intervals=lambda *_: (begin, end), seed=5)
    mask = mask_from_documents(doc_lens)
    oracle = attend(case.q, case.k, case.v, mask, softmax_scale=case.softmax_scale, dout=case.dout)
    out, lse = case.forward()
    assert_matches("out", out, oracle.out, tolerances.FP32)
    assert_lse_matches(lse, oracle.lse)
    dq, dk, dv = case.backward(lse, case.delta(out))
    for name, got, expected in (
        ("dq", dq, oracle.dq),
        ("dk", dk, oracle.dk),
        ("dv", dv, oracle.dv),
    ):
        assert_matches(name, got, expected, tolerances.FP32)


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_large_logits_do_not_overflow(logit: float) -> None:
    """exp(1e4) overflows in any format; only differences to the row's maximum may be taken."""
    case = make_case(Shape(), intervals="full", seed=6)
    q, k = case.q.clone(), case.k.clone()
    q[..., 0] = 100.0
    k[..., 0] = logit / 100.0
    shifted = dataclasses.replace(case, q=q, k=k, softmax_scale=1.0)
    oracle = shifted.oracle()
    out, lse = shifted.forward()
    # A logit of 1e4 is rounded to 1e-3 in fp32, and softmax passes that error on.
    tolerance = tolerances.Tolerance(rel_l2=1e-3, worst_row=3e-3)
    assert_matches("out", out, oracle.out, tolerance)
    assert_lse_matches(lse, oracle.lse)


def test_row_whose_scores_are_all_minus_infinity_is_empty() -> None:
    q, v = torch.ones(3, 1, 8), torch.ones(5, 1, 8)
    k = torch.full((5, 1, 8), -torch.inf)
    begin = torch.zeros(3, dtype=torch.int32)
    out, lse = partial_attention(q, k, v, begin, begin + 5, softmax_scale=1.0)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_nan_of_a_visible_key_reaches_the_rows_that_see_it() -> None:
    """Garbage that the contract does not excuse must not be hidden."""
    case = make_case(Shape(rows=40, keys=40, heads_q=1), intervals="causal", seed=7)
    case.k[25] = torch.nan
    out, lse = case.forward()
    assert not out[:25].isnan().any() and not lse[:25].isnan().any()
    assert out[25:].isnan().all() and lse[25:].isnan().all()


def test_infinite_values_do_not_reach_rows_that_see_no_key() -> None:
    """0 * inf is NaN: an empty row next to rows that see an infinite value stays exactly zero."""
    case = make_case(Shape(rows=40, keys=40, heads_q=1), intervals="full", seed=7)
    case.kv_end[5:9] = 0
    case.v[3] = torch.inf
    out, lse = case.forward()
    assert (out[5:9] == 0).all() and (lse[5:9] == -torch.inf).all()
    assert (out[9:] == torch.inf).all()
    dq, _, _ = case.backward(lse, torch.zeros_like(lse))
    assert (dq[5:9] == 0).all()


def test_rows_whose_merged_result_is_empty_have_no_gradient() -> None:
    """lse = -inf says that no rank saw a key: dq = 0, dk and dv untouched, q and dout not read."""
    case = make_case(Shape(heads_q=2), intervals="full", seed=8)
    out, lse = case.forward()
    delta = case.delta(out)
    without = dataclasses.replace(case, kv_end=case.kv_end.clone())
    without.kv_end[10:20] = 0
    expected = without.backward(lse, delta)
    lse[10:20] = -torch.inf
    delta[10:20] = torch.nan
    case.q[10:20] = torch.nan
    case.dout[10:20] = torch.inf
    for got, want in zip(case.backward(lse, delta), expected, strict=True):
        assert torch.equal(got, want)
    assert (expected[0][10:20] == 0).all()


def _split_keys(case: Case, num_parts: int) -> list[tuple[Case, slice]]:
    """The case cut into parts of the keys, as ranks would hold them; the last may be empty."""
    bounds = [len(case.k) * part // num_parts for part in range(num_parts)] + [len(case.k)]
    parts: list[tuple[Case, slice]] = []
    for start, stop in itertools.pairwise(bounds):
        keys = slice(start, stop)
        part = dataclasses.replace(
            case,
            k=case.k[keys],
            v=case.v[keys],
            kv_begin=(case.kv_begin - start).clamp(0, stop - start),
            kv_end=(case.kv_end - start).clamp(0, stop - start),
        )
        parts.append((part, keys))
    return parts


def test_overwriting_gives_the_bits_of_adding_to_zeros() -> None:
    case = make_case(Shape(), intervals="scattered")
    out, lse = case.forward()
    delta = case.delta(out)
    expected = case.backward(lse, delta)
    dk, dv = torch.full(case.k.shape, torch.nan), torch.full(case.v.shape, torch.nan)
    dq = case.backward_into(lse, delta, dk, dv, accumulate=False)
    assert all(torch.equal(a, b) for a, b in zip(expected, (dq, dk, dv), strict=True))


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_split_keys_merge_to_the_whole(num_parts: int, intervals: str) -> None:
    """The idea of the package: partials join exactly; backward takes the merged lse and delta."""
    shape = Shape(rows=90, keys=211, heads_q=4, heads_kv=2, dim_v=48)
    case = make_case(shape, intervals=intervals, seed=9)
    oracle = case.oracle()
    parts = _split_keys(case, num_parts)
    results = [part.forward() for part, _ in parts]
    out = torch.full_like(results[0][0], torch.nan)
    lse = torch.full_like(results[0][1], -torch.inf)
    rows = torch.arange(shape.rows, dtype=torch.int32)
    slots = (rows[:, None] + torch.arange(num_parts, dtype=torch.int32) * shape.rows).flatten()
    pointers = torch.arange(shape.rows + 1, dtype=torch.int32) * num_parts
    part_out, part_lse = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    merge_partials_(out, lse, part_out, part_lse, pointers, slots)
    assert_matches("out", out, oracle.out, tolerances.FP32)
    assert_lse_matches(lse, oracle.lse)

    delta = case.delta(out)
    dq = torch.zeros(case.q.shape)
    dk, dv = torch.zeros(case.k.shape), torch.zeros(case.v.shape)
    for part, keys in parts:
        dq += part.backward_into(lse, delta, dk[keys], dv[keys])
    assert_matches("dq", dq, oracle.dq, tolerances.FP32)
    assert_matches("dk", dk, oracle.dk, tolerances.FP32)
    assert_matches("dv", dv, oracle.dv, tolerances.FP32)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_and_any_intervals(data: st.DataObject) -> None:
    heads_kv = data.draw(st.integers(1, 3), "heads_kv")
    shape = Shape(
        rows=data.draw(st.integers(0, 140), "rows"),
        keys=data.draw(st.integers(0, 300), "keys"),
        heads_q=heads_kv * data.draw(st.integers(1, 5), "group"),
        heads_kv=heads_kv,
        dim_qk=data.draw(st.integers(1, 70), "dim_qk"),
        dim_v=data.draw(st.integers(1, 70), "dim_v"),
    )
    intervals = data.draw(st.sampled_from(sorted(INTERVALS)), "intervals")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    case = make_case(shape, intervals=intervals, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    check_forward(case)
    check_backward(case, tolerances.FP32_TINY)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_registration(op: str) -> None:
    """Schema, mutated arguments, fake kernel and shapes under torch.compile's tracing."""
    case = make_case(Shape(rows=9, keys=11), intervals="full")
    tests = ("test_schema", "test_faketensor")
    scale = case.softmax_scale
    tensors = (case.q, case.k, case.v, case.kv_begin, case.kv_end)
    if op == "forward":
        for dtype in DTYPES:
            out, lse = (
                torch.empty(9, case.q.shape[1], case.v.shape[2]),
                torch.empty(case.q.shape[:2]),
            )
            torch.library.opcheck(
                torch.ops.megatron_splitkv.partial_attention_.default,
                (*tensors, out.to(dtype), lse),
                {"softmax_scale": scale},
                test_utils=tests,
            )
        return
    out, lse = case.forward()
    dq, dk, dv = (torch.zeros(x.shape) for x in (case.q, case.k, case.v))
    seen = (case.kv_begin, case.kv_end)
    tensors = (case.dout, case.q, case.k, case.v, lse, case.delta(out), *seen)
    for accumulate in (True, False):
        torch.library.opcheck(
            torch.ops.megatron_splitkv.partial_attention_backward_.default,
            (*tensors, dq, dk, dv),
            {"softmax_scale": scale, "accumulate": accumulate},
            test_utils=tests,
        )


@pytest.mark.gpu
def test_gpu_has_no_kernel_for_fp32_and_wants_one_device() -> None:
    case = make_case(Shape())
    tensors = [x.cuda() for x in (case.q, case.k, case.v, case.kv_begin, case.kv_end)]
    with pytest.raises(ValueError, match=r"q has dtype torch\.float32, needs bfloat16 or float16"):
        partial_attention(*tensors, softmax_scale=1.0)
    with pytest.raises(ValueError, match=r"v is on cpu, needs cuda:0"):
        partial_attention(*tensors[:2], case.v, *tensors[3:], softmax_scale=1.0)
