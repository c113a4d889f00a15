"""What only the CPU kernels promise: instruction sets, threads, and offsets beyond 2^31."""

import dataclasses
import mmap

import pytest
import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import merge_partials_
from megatron_splitkv.ops.native import launch_on
from tests.ops.cases import Case, Shape, check_backward, check_forward, make_case

ISAS = _kernels.cpu_isas().split()


@pytest.mark.usefixtures("restored_isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, dtype: torch.dtype) -> None:
    _kernels.force_cpu_isa(isa)
    for seed, dims in enumerate([(64, 64), (40, 19), (1, 1), (192, 128)]):
        shape = Shape(rows=90, keys=200, heads_q=3, dim_qk=dims[0], dim_v=dims[1])
        for intervals in ("random", "causal", "scattered"):
            case = make_case(shape, intervals=intervals, dtype=dtype, seed=seed)
            check_forward(case, dtype)
            check_backward(case)


@pytest.mark.usefixtures("restored_isa")
def test_instruction_sets_are_distinct_and_agree() -> None:
    """Other vector lengths add in another order: close, but a forced one must really be used."""
    assert ISAS[-1] == "baseline"
    case = make_case(Shape(rows=130, keys=400, dim_qk=128, dim_v=128), intervals="full")
    results: dict[str, Tensor] = {}
    for isa in ISAS:
        _kernels.force_cpu_isa(isa)
        assert _kernels.current_cpu_isa() == isa
        results[isa], _ = case.forward()
    for isa in ISAS[:-1]:
        torch.testing.assert_close(results[isa], results["baseline"], rtol=1e-5, atol=1e-6)
    _kernels.force_cpu_isa("auto")
    assert _kernels.current_cpu_isa() == ISAS[0]


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"instruction set 'mmx' is not one of: auto .*baseline"):
        _kernels.force_cpu_isa("mmx")


def _run(case: Case) -> list[Tensor]:
    out, lse = case.forward()
    return [out, lse, *case.backward(lse, case.delta(out))]


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("heads", [(3, 1), (4, 4)])
@pytest.mark.parametrize("intervals", ["full", "causal", "scattered", "staggered"])
def test_bitwise_the_same_for_any_number_of_threads(intervals: str, heads: tuple[int, int]) -> None:
    """dk and dv are sums over row tiles that different threads compute."""
    shape = Shape(rows=300, keys=600, heads_q=heads[0], heads_kv=heads[1])
    case = make_case(shape, intervals=intervals)
    torch.set_num_threads(1)
    expected = _run(case)
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        for _ in range(4):
            for got, want in zip(_run(case), expected, strict=True):
                assert torch.equal(got, want)


@pytest.mark.usefixtures("restored_threads")
def test_merge_is_bitwise_the_same_for_any_number_of_threads() -> None:
    part_out, part_lse = torch.randn(200, 4, 32), torch.randn(200, 4)
    ptr, slots = torch.arange(51).int() * 4, torch.randperm(200).int()
    results: list[Tensor] = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        out, lse = torch.zeros(50, 4, 32), torch.zeros(50, 4)
        merge_partials_(out, lse, part_out, part_lse, ptr, slots)
        results.append(torch.cat([out, lse[..., None]], dim=-1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Rows and heads this far apart: element 2 * STRIDE is 2^31, where an int32 offset turns negative.
STRIDE = 2**30
MAP_NORESERVE = 0x4000  # of Linux; the mmap module names it from Python 3.13 on


def _far_apart(tensor: Tensor, is_head_far: bool) -> Tensor:
    """A copy whose rows, or heads, lie STRIDE elements apart in memory that is mapped on touch."""
    rows, heads, dim = tensor.shape
    far, near = (heads, rows) if is_head_far else (rows, heads)
    num_elements = (far - 1) * STRIDE + near * dim
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, num_elements * tensor.element_size(), flags=flags)
    strides = (dim, STRIDE, 1) if is_head_far else (STRIDE, dim, 1)
    view = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("is_head_far", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_beyond_two_to_the_31(dtype: torch.dtype, is_head_far: bool) -> None:
    """Every tensor in turn has its last row, or head, 2^31 elements after its first."""
    plain = make_case(Shape(rows=3, keys=3, heads_q=3, heads_kv=3), intervals="full", dtype=dtype)
    out, lse = plain.forward()
    delta = plain.delta(out)
    dq, dk, dv = plain.backward(lse, delta)
    for name in ("q", "k", "v", "dout"):
        case = dataclasses.replace(plain, **{name: _far_apart(getattr(plain, name), is_head_far)})
        for got, want in zip(_run(case), (out, lse, dq, dk, dv), strict=True):
            assert torch.equal(got, want), name
    far_dk, far_dv = (_far_apart(torch.zeros_like(x), is_head_far) for x in (dk, dv))
    far_lse, far_delta = (_far_apart(x[..., None], is_head_far)[..., 0] for x in (lse, delta))
    far_dq = plain.backward_into(far_lse, far_delta, far_dk, far_dv)
    for got, want in zip((far_dq, far_dk, far_dv), (dq, dk, dv), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("is_head_far", [False, True])
def test_outputs_beyond_two_to_the_31(is_head_far: bool) -> None:
    """The ops allocate dense outputs, so the kernels are called directly."""
    case = make_case(Shape(rows=3, keys=3, heads_q=3, heads_kv=3), intervals="full")
    out, lse = case.forward()
    far_out = _far_apart(torch.zeros_like(out), is_head_far)
    far_lse = _far_apart(torch.zeros_like(lse)[..., None], is_head_far)[..., 0]
    num_bytes = _kernels.forward_workspace_bytes(
        device=_kernels.Device.cpu,
        head_dim_qk=32,
        head_dim_v=32,
        num_threads=torch.get_num_threads(),
        work_shape=(),
    )
    workspace = torch.empty(num_bytes, dtype=torch.uint8)
    _kernels.forward(
        q=case.q,
        k=case.k,
        v=case.v,
        kv_begin=case.kv_begin.data_ptr(),
        kv_end=case.kv_end.data_ptr(),
        out=far_out,
        lse=far_lse,
        softmax_scale=case.softmax_scale,
        work=0,
        work_shape=(),
        launch=launch_on(workspace.device, workspace),
    )
    assert torch.equal(far_out, out)
    assert torch.equal(far_lse, lse)


@pytest.mark.parametrize("is_head_far", [False, True])
def test_merge_beyond_two_to_the_31(is_head_far: bool) -> None:
    tensors = [torch.randn(3, 3, 8), torch.randn(3, 3), torch.randn(3, 3, 8), torch.randn(3, 3)]
    far = [_far_apart(x.reshape(3, 3, -1), is_head_far).view_as(x) for x in tensors]
    ptr, slots = torch.arange(4).int(), torch.tensor([2, 1, 0]).int()
    merge_partials_(*tensors, ptr, slots)
    merge_partials_(*far, ptr, slots)
    assert torch.equal(far[0], tensors[0])
    assert torch.equal(far[1], tensors[1])
