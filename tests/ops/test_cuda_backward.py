"""Backward on a GPU against the fp64 oracle."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.ops import WorkLists, partial_attention_backward
from megatron_splitkv.ops.cuda import HEAD_DIMS
from megatron_splitkv.ops.delta import attention_delta
from tests import tolerances
from tests.ops.cases import INTERVALS, Case, Shape
from tests.ops.cuda_cases import (
    backward,
    check_backward,
    forward,
    make_backward_case,
    oracle_with_gradients,
    softmax_of,
)
from tests.oracle import assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

DTYPES = [torch.bfloat16, torch.float16]
# Row tiles hold 16 to 128 rows, KV tiles 16 to 128 keys.
ROW_SIZES = [0, 1, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 307]
KEY_SIZES = [0, 1, 7, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 353]


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("rows", ROW_SIZES)
def test_sizes_around_a_tile(rows: int, dims: tuple[int, int]) -> None:
    for keys in KEY_SIZES:
        for intervals in ("random", "full"):
            shape = Shape(rows=rows, keys=keys, dim_qk=dims[0], dim_v=dims[1])
            check_backward(make_backward_case(shape, intervals=intervals))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("intervals", INTERVALS)
def test_intervals(
    intervals: str, dims: tuple[int, int], dtype: torch.dtype, is_deterministic: bool
) -> None:
    shape = Shape(rows=700, keys=900, heads_q=4, heads_kv=2, dim_qk=dims[0], dim_v=dims[1])
    case = make_backward_case(shape, intervals=intervals, dtype=dtype)
    check_backward(case, is_deterministic=is_deterministic)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("rows", [3, 40, 300, 2000])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1), (7, 1), (8, 2), (6, 2), (4, 4)])
def test_heads(heads: tuple[int, int], rows: int, dims: tuple[int, int]) -> None:
    shape = Shape(
        rows=rows, keys=1000, heads_q=heads[0], heads_kv=heads[1], dim_qk=dims[0], dim_v=dims[1]
    )
    check_backward(make_backward_case(shape, intervals="causal" if rows < 1000 else "full", seed=1))


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_many_items_of_one_step(dims: tuple[int, int]) -> None:
    """A CTA's dk and dv leave while those of its next item come, with hardly a step between."""
    shape = Shape(rows=16, keys=33000, heads_q=16, heads_kv=8, dim_qk=dims[0], dim_v=dims[1])
    case = make_backward_case(shape, intervals="full")
    for is_deterministic in (False, True):
        check_backward(case, is_deterministic=is_deterministic)


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("intervals", ["full", "random"])
def test_split_rows(intervals: str, dims: tuple[int, int]) -> None:
    """Few keys and many rows: the rows go to several CTAs, which add to dk and dv in turn."""
    shape = Shape(rows=9001, keys=200, heads_q=2, heads_kv=1, dim_qk=dims[0], dim_v=dims[1])
    case = make_backward_case(shape, intervals=intervals, seed=2)
    work = WorkLists(case.kv_begin.cpu(), case.kv_end.cpu()).backward(case.q, case.k, case.v)
    num_splits = work.shape[-3]
    assert num_splits > 0
    check_backward(case)
    check_backward(case, is_deterministic=True)


@pytest.mark.parametrize("rows", [0, 700, 9001])
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("intervals", [*INTERVALS, "few keys"])
def test_overwriting(intervals: str, dims: tuple[int, int], rows: int) -> None:
    """The same bits as adding to zeros, whatever dk and dv held, also for keys that none sees."""
    keys = 200 if rows == 9001 else 900  # few keys and many rows: split into parts
    shape = Shape(rows=rows, keys=keys, heads_q=4, heads_kv=2, dim_qk=dims[0], dim_v=dims[1])
    make_intervals = _see_few_keys if intervals == "few keys" else intervals
    case = make_backward_case(shape, intervals=make_intervals, seed=3)
    lse = torch.zeros(case.q.shape[:2], device="cuda")
    delta = torch.zeros_like(lse)
    zeros, dirty = (
        [torch.full((keys, 2, dim), value, device="cuda") for dim in dims]
        for value in (0.0, torch.nan)
    )
    dq = backward(case, lse, delta, *zeros, is_deterministic=True)
    other_dq = backward(case, lse, delta, *dirty, is_deterministic=True, accumulate=False)
    for a, b in zip((dq, *zeros), (other_dq, *dirty), strict=True):
        assert torch.equal(a, b)


def _see_few_keys(rows: int, keys: int, _: torch.Generator) -> tuple[Tensor, Tensor]:
    """Most KV tiles are seen by no row."""
    begin = torch.full((rows,), keys * 3 // 4, dtype=torch.int32)
    return begin, begin + 5


def _gradients(case: Case, lse: Tensor, delta: Tensor) -> list[Tensor]:
    dk, dv = torch.ones(case.k.shape, device="cuda"), torch.ones(case.v.shape, device="cuda")
    return [backward(case, lse, delta, dk, dv, is_deterministic=True), dk, dv]


def test_strided_inputs() -> None:
    shape = Shape(rows=300, keys=300, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
    plain = make_backward_case(shape, seed=4)
    lse, delta = softmax_of(plain, oracle_with_gradients(plain))
    expected = _gradients(plain, lse, delta)
    names = ("q", "k", "v", "dout")
    fused = torch.cat([getattr(plain, name).flatten(1) for name in names], dim=1)
    widths = [getattr(plain, name).flatten(1).shape[1] for name in names]
    views = {
        name: view.unflatten(1, getattr(plain, name).shape[1:])
        for name, view in zip(names, fused.split(widths, dim=1), strict=True)
    }
    heads_first = {
        name: getattr(plain, name).transpose(0, 1).contiguous().transpose(0, 1) for name in names
    }
    for tensors in (views, heads_first):
        strided = dataclasses.replace(plain, **tensors)
        assert not strided.q.is_contiguous()
        got = _gradients(strided, lse.t().contiguous().t(), delta.t().contiguous().t())
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_strided_gradients() -> None:
    """dk and dv as views of one buffer, as a fused projection wants them."""
    shape = Shape(rows=100, keys=300, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, seed=4)
    lse, delta = softmax_of(case, oracle_with_gradients(case))
    _, dk, dv = _gradients(case, lse, delta)
    both = torch.ones(300, 2, 256, device="cuda")
    backward(case, lse, delta, both[:, :, :128], both[:, :, 128:])
    assert torch.equal(both, torch.cat([dk, dv], dim=2))
    fresh = [torch.empty(300, 2, 128, device="cuda") for _ in range(2)]
    backward(case, lse, delta, *fresh, accumulate=False)
    rounded = torch.full((300, 2, 256), torch.nan, dtype=case.q.dtype, device="cuda")
    backward(case, lse, delta, rounded[:, :, :128], rounded[:, :, 128:], accumulate=False)
    assert torch.equal(rounded, torch.cat(fresh, dim=2).to(rounded.dtype))


def test_expanded_dout() -> None:
    shape = Shape(rows=90, keys=300, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="full", seed=4)
    row = torch.randn(1, 1, 128, device="cuda").bfloat16()
    check_backward(dataclasses.replace(case, dout=row.expand(case.dout.shape)))
    check_backward(dataclasses.replace(case, dout=case.dout.float()))


def test_offsets_beyond_32_bits() -> None:
    """Rows 2^30 elements apart, as views of one storage; dk 2^31 bytes apart."""
    shape = Shape(rows=9, keys=3, heads_q=2, heads_kv=1, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="full", seed=5)
    stride = 2**31 // 2 + 8
    storage = torch.empty(2 * stride + 256, dtype=torch.bfloat16, device="cuda")
    far_k = storage.as_strided((3, 1, 128), (stride, 128, 1))
    far_v = storage.as_strided((3, 1, 128), (stride, 128, 1), 128)
    far_k.copy_(case.k)
    far_v.copy_(case.v)
    far = dataclasses.replace(case, k=far_k, v=far_v)
    lse, delta = softmax_of(case, oracle_with_gradients(case))
    gradients = torch.zeros(2 * stride + 256, device="cuda")
    far_dk = gradients.as_strided((3, 1, 128), (stride, 128, 1))
    far_dv = gradients.as_strided((3, 1, 128), (stride, 128, 1), 128)
    dq = backward(far, lse, delta, far_dk, far_dv)
    expected_dq, dk, dv = _gradients(case, lse, delta)
    assert torch.equal(dq, expected_dq)
    assert torch.equal(far_dk + 1.0, dk)
    assert torch.equal(far_dv + 1.0, dv)


def test_rows_without_a_merged_result_add_nothing() -> None:
    """lse = -inf says that no rank saw a key: dq = 0, and delta may be anything."""
    shape = Shape(rows=200, keys=300, heads_q=2, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="full", seed=6)
    begin, end = case.kv_begin.clone(), case.kv_end.clone()
    end[50:150] = 0
    emptied = dataclasses.replace(case, kv_begin=begin, kv_end=end)
    oracle = oracle_with_gradients(emptied)
    dq, dk, dv = _gradients(case, *softmax_of(emptied, oracle))
    assert (dq[50:150] == 0).all()
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[torch.bfloat16]
    assert_matches("dq", dq, oracle.dq, tolerance)
    assert_matches("dk", dk.double() - 1.0, oracle.dk, tolerance)
    assert_matches("dv", dv.double() - 1.0, oracle.dv, tolerance)


def test_parts_of_the_keys_add_up() -> None:
    """Two halves of the keys, under the softmax of the whole: what ranks compute."""
    shape = Shape(rows=333, keys=600, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="causal", seed=7)
    oracle = oracle_with_gradients(case)
    out, lse = forward(case)
    delta = attention_delta(case.dout, out)
    dk, dv = torch.zeros(case.k.shape, device="cuda"), torch.zeros(case.v.shape, device="cuda")
    dq = torch.zeros(case.q.shape, device="cuda")
    for half in (slice(0, 250), slice(250, 600)):
        local = dataclasses.replace(
            case,
            k=case.k[half],
            v=case.v[half],
            kv_begin=(case.kv_begin - half.start).clamp(0, half.stop - half.start),
            kv_end=(case.kv_end - half.start).clamp(0, half.stop - half.start),
        )
        dq += backward(local, lse, delta, dk[half], dv[half])
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[torch.bfloat16]
    assert_matches("dq", dq, oracle.dq, tolerance)
    assert_matches("dk", dk, oracle.dk, tolerance)
    assert_matches("dv", dv, oracle.dv, tolerance)


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("rows", [3000, 9001])
def test_repeats_are_bitwise_equal(rows: int, dims: tuple[int, int]) -> None:
    """dk and dv in any mode, dq in deterministic mode."""
    keys = 3000 if rows == 3000 else 200
    shape = Shape(rows=rows, keys=keys, heads_q=8, heads_kv=2, dim_qk=dims[0], dim_v=dims[1])
    case = make_backward_case(shape, intervals="full", seed=8)
    out, lse = forward(case)
    delta = attention_delta(case.dout, out)
    first = _gradients(case, lse, delta)
    for _ in range(20):
        assert all(
            torch.equal(a, b) for a, b in zip(first, _gradients(case, lse, delta), strict=True)
        )
        dk, dv = torch.ones_like(first[1]), torch.ones_like(first[2])
        backward(case, lse, delta, dk, dv)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])


@pytest.mark.parametrize(("keys", "heads"), [(17000, (64, 1)), (2200, (128, 2))])
def test_rows_beyond_l2_come_in_bands(keys: int, heads: tuple[int, int]) -> None:
    """The sums of the deterministic mode, which has no bands, in another order."""
    shape = Shape(rows=840, keys=keys, heads_q=heads[0], heads_kv=heads[1], dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="full", seed=8)
    out, lse = forward(case)
    delta = attention_delta(case.dout, out)
    dk, dv = (torch.ones(x.shape, device="cuda") for x in (case.k, case.v))
    dq = backward(case, lse, delta, dk, dv)
    for got, expected in zip((dq, dk, dv), _gradients(case, lse, delta), strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_capture_in_a_graph() -> None:
    shape = Shape(rows=500, keys=900, heads_q=8, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_backward_case(shape, intervals="random", seed=8)
    lse, delta = softmax_of(case, oracle_with_gradients(case))
    expected = _gradients(case, lse, delta)
    begin, end = case.kv_begin.cpu(), case.kv_end.cpu()
    work = WorkLists(begin, end, is_deterministic=True)
    work.backward(case.q, case.k, case.v)
    dk, dv = torch.ones_like(expected[1]), torch.ones_like(expected[2])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dq = partial_attention_backward(
            case.dout,
            case.q,
            case.k,
            case.v,
            lse,
            delta,
            case.kv_begin,
            case.kv_end,
            dk,
            dv,
            softmax_scale=case.softmax_scale,
            work=work,
        )
    for _ in range(2):
        dq.fill_(torch.nan)
        dk.fill_(1.0)
        dv.fill_(1.0)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, (dq, dk, dv), strict=True))


def test_refusals() -> None:
    case = make_backward_case(Shape(dim_qk=128, dim_v=128))
    lse, delta = softmax_of(case, oracle_with_gradients(case))
    dk, dv = torch.zeros(case.k.shape, device="cuda"), torch.zeros(case.v.shape, device="cuda")
    with pytest.raises(ValueError, match=r"work=None, but q is on cuda:0"):
        partial_attention_backward(
            case.dout, case.q, case.k, case.v, lse, delta, case.kv_begin, case.kv_end, dk, dv,
            softmax_scale=case.softmax_scale,
        )  # fmt: skip
    shifted = torch.empty(dk.numel() + 1, device="cuda")[1:].view(dk.shape)
    for accumulate in (True, False):
        with pytest.raises(ValueError, match=r"dk has address .*; pass dk\.contiguous\(\)"):
            backward(case, lse, delta, shifted, dv, accumulate=accumulate)
    wide = make_backward_case(Shape(dim_qk=80, dim_v=80))
    with pytest.raises(UnsupportedError, match=r"head dims \(qk, v\) are \(80, 80\), need one"):
        backward(
            wide, lse, delta, torch.zeros(wide.k.shape, device="cuda"),
            torch.zeros(wide.v.shape, device="cuda"),
        )  # fmt: skip
