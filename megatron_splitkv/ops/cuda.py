"""What the ops share on CUDA: what the kernels refuse, and the work list of a call."""

from functools import cache

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.ops.work_lists import DeviceWork, WorkLists, device_capability

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # (D, Dv), forward and backward
DTYPES = (torch.bfloat16, torch.float16)
_OLDEST = (8, 0)  # compute capability


def is_built() -> bool:
    """Whether this build holds CUDA kernels, whatever the machine."""
    return _kernels.has_cuda_kernels()


def check_supported(q: Tensor, v: Tensor) -> None:
    """Refuses by name what no CUDA kernel of this build can run.

    Args:
        q: query rows, `[Tq, Hq, D]`.
        v: values, `[Tk, Hkv, Dv]`.
    Raises:
        UnsupportedError: the build, the device, the dtype or the head dims have no kernel.
    """
    message = _refusal(q.device, q.dtype, (q.shape[2], v.shape[2]))
    if message is not None:
        raise UnsupportedError(message)


@cache
def _refusal(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    if not is_built():
        return (
            f"q is on {device}, but this build holds CPU kernels only; install megatron_splitkv "
            "again where nvcc is on the PATH"
        )
    capability = device_capability(device)
    if capability < _OLDEST:
        return (
            f"{device} has compute capability {capability[0]}.{capability[1]}, needs 8.0 (A100) "
            "or later; run on the CPU"
        )
    if dtype not in DTYPES:
        return f"q has dtype {dtype}, needs bfloat16 or float16 on CUDA; convert q, k and v"
    if dims not in HEAD_DIMS:
        need = ", ".join(map(str, HEAD_DIMS))
        return f"head dims (qk, v) are {dims}, need one of {need} on CUDA; pad q, k and v"
    return None


def forward_work(q: Tensor, k: Tensor, v: Tensor, work: WorkLists | None) -> DeviceWork:
    """The work list that the forward needs on CUDA.

    Raises:
        ValueError: work is None, or does not fit the tensors.
        UnsupportedError: see `check_supported`.
    """
    check_supported(q, v)
    return _given(work, q).forward(q, k, v)


def backward_work(q: Tensor, k: Tensor, v: Tensor, work: WorkLists | None) -> DeviceWork:
    """The work list that the backward needs on CUDA.

    Raises:
        ValueError: work is None, or does not fit the tensors.
        UnsupportedError: see `check_supported`.
    """
    check_supported(q, v)
    return _given(work, q).backward(q, k, v)


def _given(work: WorkLists | None, q: Tensor) -> WorkLists:
    if work is None:
        raise ValueError(
            f"work=None, but q is on {q.device}, where the kernels need a work list; pass "
            "WorkLists(kv_begin.cpu(), kv_end.cpu()), made once for all layers of a microbatch"
        )
    return work
