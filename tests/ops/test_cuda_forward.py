"""Forward on a GPU against the fp64 oracle."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.ops import WorkLists, partial_attention
from tests import tolerances
from tests.ops.cases import INTERVALS, Case, Shape
from tests.ops.cuda_cases import check_forward, forward, make_cuda_case, oracle_of
from tests.oracle import assert_lse_matches, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

DTYPES = [torch.bfloat16, torch.float16]
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
# Row tiles hold 64, 128 or 192 rows, key tiles 64, 80, 128 or 176 keys.
ROW_SIZES = [0, 1, 63, 64, 65, 127, 128, 129, 191, 193, 307]
KEY_SIZES = [0, 1, 63, 64, 65, 79, 81, 127, 128, 129, 175, 176, 177, 353, 509]


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("rows", ROW_SIZES)
def test_sizes_around_a_tile(rows: int, dims: tuple[int, int]) -> None:
    for keys in KEY_SIZES:
        for intervals in ("random", "full"):
            shape = Shape(rows=rows, keys=keys, dim_qk=dims[0], dim_v=dims[1])
            check_forward(make_cuda_case(shape, intervals=intervals))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("intervals", INTERVALS)
def test_intervals(intervals: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(rows=700, keys=900, heads_q=4, heads_kv=2, dim_qk=dims[0], dim_v=dims[1])
    check_forward(make_cuda_case(shape, intervals=intervals, dtype=dtype))


@pytest.mark.parametrize("rows", [3, 40, 300, 3000])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1), (7, 1), (8, 2), (6, 2), (4, 4)])
def test_heads(heads: tuple[int, int], rows: int) -> None:
    shape = Shape(rows=rows, keys=1000, heads_q=heads[0], heads_kv=heads[1], dim_qk=128, dim_v=128)
    check_forward(make_cuda_case(shape, intervals="causal" if rows < 1000 else "full", seed=1))


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_split_keys(rows: int, dims: tuple[int, int], out_dtype: torch.dtype) -> None:
    """Few rows and many keys: the keys of a tile go to several CTAs, whose parts are merged."""
    shape = Shape(rows=rows, keys=9001, heads_q=8, heads_kv=2, dim_qk=dims[0], dim_v=dims[1])
    case = make_cuda_case(shape, intervals="full", seed=2)
    work = WorkLists(case.kv_begin.cpu(), case.kv_end.cpu()).forward(case.q, case.k, case.v)
    num_merge_rows = work.shape[-2]
    assert num_merge_rows == rows
    check_forward(case, out_dtype)
    check_forward(make_cuda_case(shape, intervals="random", seed=2), out_dtype)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_dtypes(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    case = make_cuda_case(Shape(dim_qk=128, dim_v=128), dtype=dtype, seed=3)
    check_forward(case, out_dtype)
    exact, _ = forward(case)
    assert torch.equal(forward(case, out_dtype)[0], exact.to(out_dtype))


def _fused(case: Case) -> Case:
    """q, k, v as views of one projection's output, stored behind each other in each row."""
    parts = [x.flatten(1) for x in (case.q, case.k, case.v)]
    fused = torch.cat(parts, dim=1)
    views = fused.split([part.shape[1] for part in parts], dim=1)
    q, k, v = (
        view.unflatten(1, x.shape[1:])
        for view, x in zip(views, (case.q, case.k, case.v), strict=True)
    )
    return dataclasses.replace(case, q=q, k=k, v=v)


def _head_major(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def test_strided_inputs() -> None:
    shape = Shape(rows=300, keys=300, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
    plain = make_cuda_case(shape, seed=4)
    heads_first = dataclasses.replace(
        plain, q=_head_major(plain.q), k=_head_major(plain.k), v=_head_major(plain.v)
    )
    out, lse = forward(plain)
    for strided in (_fused(plain), heads_first):
        assert not strided.q.is_contiguous()
        strided_out, strided_lse = forward(strided)
        assert torch.equal(out, strided_out)
        assert torch.equal(lse, strided_lse)


def test_strides_of_single_rows_and_heads_do_not_matter() -> None:
    shape = Shape(rows=1, keys=40, heads_q=1, dim_qk=128, dim_v=128)
    case = make_cuda_case(shape, intervals="full", seed=4)
    odd_q = case.q.as_strided(case.q.shape, (3, 5, 1))
    odd_k = case.k.as_strided(case.k.shape, (128, 7, 1))
    check_forward(dataclasses.replace(case, q=odd_q, k=odd_k))


def test_expanded_heads() -> None:
    """One stored KV head that stands for four: a stride of 0."""
    shape = Shape(rows=100, keys=300, heads_q=8, heads_kv=1, dim_qk=128, dim_v=128)
    case = make_cuda_case(shape, seed=4)
    wide = dataclasses.replace(case, k=case.k.expand(-1, 4, -1), v=case.v.expand(-1, 4, -1))
    assert wide.k.stride(1) == 0
    check_forward(wide)


def test_offsets_beyond_32_bits() -> None:
    """Keys 2^31 elements apart, as views of one storage."""
    shape = Shape(rows=9, keys=3, heads_q=2, heads_kv=1, dim_qk=128, dim_v=128)
    case = make_cuda_case(shape, intervals="full", seed=5)
    stride = 2**31 // 2 + 8
    storage = torch.empty(2 * stride + 256, dtype=torch.bfloat16, device="cuda")
    far_k = storage.as_strided((3, 1, 128), (stride, 128, 1))
    far_v = storage.as_strided((3, 1, 128), (stride, 128, 1), 128)
    far_k.copy_(case.k)
    far_v.copy_(case.v)
    check_forward(dataclasses.replace(case, k=far_k, v=far_v))


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_large_logits_do_not_overflow(logit: float) -> None:
    case = make_cuda_case(Shape(dim_qk=128, dim_v=128), intervals="full", seed=6)
    q, k = case.q.clone(), case.k.clone()
    q[..., 0] = 100.0
    k[..., 0] = logit / 100.0
    shifted = dataclasses.replace(case, q=q, k=k, softmax_scale=1.0)
    oracle = oracle_of(shifted)
    out, lse = forward(shifted)
    # A logit of 1e4 is rounded to 1e-3 in fp32, and softmax passes that error on.
    tolerance = tolerances.Tolerance(rel_l2=5e-3, worst_row=1e-2)
    assert_matches("out", out, oracle.out, tolerance)
    assert_lse_matches(lse, oracle.lse, tolerances.CUDA_LSE_ABS)


def test_row_whose_scores_are_all_minus_infinity_is_empty() -> None:
    shape = Shape(rows=3, keys=300, heads_q=1, dim_qk=64, dim_v=64)
    case = make_cuda_case(shape, intervals="full")
    hidden = dataclasses.replace(
        case, q=torch.ones_like(case.q), k=torch.full_like(case.k, -torch.inf)
    )
    out, lse = forward(hidden)
    assert (lse == -torch.inf).all()
    assert (out == 0).all()


@pytest.mark.parametrize("rows", [20, 2000])
def test_repeats_are_bitwise_equal(rows: int) -> None:
    shape = Shape(rows=rows, keys=5000, heads_q=8, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_cuda_case(shape, intervals="random", seed=7)
    first_out, first_lse = forward(case)
    for _ in range(20):
        out, lse = forward(case)
        assert torch.equal(out, first_out)
        assert torch.equal(lse, first_lse)


def test_capture_in_a_graph_and_on_a_side_stream() -> None:
    shape = Shape(rows=50, keys=4000, heads_q=8, heads_kv=2, dim_qk=128, dim_v=128)
    case = make_cuda_case(shape, intervals="random", seed=8)
    expected_out, expected_lse = forward(case)
    work = WorkLists(case.kv_begin.cpu(), case.kv_end.cpu())
    work.forward(case.q, case.k, case.v)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = partial_attention(
            case.q,
            case.k,
            case.v,
            case.kv_begin,
            case.kv_end,
            softmax_scale=case.softmax_scale,
            work=work,
        )
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_nan_of_a_query_reaches_its_row(dims: tuple[int, int]) -> None:
    """All its scores are NaN, so its largest score stays -inf, as if it saw no key."""
    shape = Shape(rows=70, keys=400, dim_qk=dims[0], dim_v=dims[1])
    case = make_cuda_case(shape, intervals="full")
    case.q[5] = torch.nan
    out, lse = forward(case)
    assert out[5].isnan().all() and lse[5].isnan().all()
    others = [row for row in range(70) if row != 5]
    assert not out[others].isnan().any() and not lse[others].isnan().any()


def test_refusals() -> None:
    case = make_cuda_case(Shape(dim_qk=128, dim_v=128))
    with pytest.raises(ValueError, match=r"work=None, but q is on cuda:0"):
        partial_attention(
            case.q, case.k, case.v, case.kv_begin, case.kv_end, softmax_scale=case.softmax_scale
        )
    in_fp32 = dataclasses.replace(case, q=case.q.float(), k=case.k.float(), v=case.v.float())
    with pytest.raises(UnsupportedError, match=r"q has dtype torch\.float32, needs bfloat16 or"):
        forward(in_fp32)
    with pytest.raises(UnsupportedError, match=r"head dims \(qk, v\) are \(32, 32\), need one of"):
        forward(make_cuda_case(Shape()))
    shifted = torch.empty(case.k.numel() + 1, dtype=case.k.dtype, device="cuda")[1:]
    with pytest.raises(ValueError, match=r"k has address .*, needs multiples of 16"):
        forward(dataclasses.replace(case, k=shifted.view(case.k.shape).copy_(case.k)))
    with pytest.raises(ValueError, match=r"softmax_scale=0 must be positive on CUDA"):
        forward(dataclasses.replace(case, softmax_scale=0.0))
    other = WorkLists(case.kv_begin[:5].cpu(), case.kv_end[:5].cpu())
    with pytest.raises(ValueError, match=r"q has 70 rows, but work was made for 5"):
        other.forward(case.q, case.k, case.v)
