"""What the ops share: tensor checks, and handing tensors to the native kernels."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.errors import UnsupportedError

OP_NAMESPACE = "megatron_splitkv"
MAX_HEAD_DIM = 512
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NATIVE_DTYPES = {
    torch.float32: _kernels.DType.float32,
    torch.bfloat16: _kernels.DType.bfloat16,
    torch.float16: _kernels.DType.float16,
}
_NATIVE_DEVICES = {"cpu": _kernels.Device.cpu, "cuda": _kernels.Device.cuda}


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Checks one argument of an op; -1 in `shape` admits any size.

    Raises:
        ValueError: wrong shape, dtype or device, or the last dimension is not contiguous.
    """
    got = tensor.shape
    if got != shape and not _fits(got, shape):
        need = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(got)}, needs [{need}]")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, needs {names}; "
            f"convert it with {name}.to(...)"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, needs {device}, as the first argument")
    if len(got) == 3 and got[2] > 1 and tensor.stride(2) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, needs 1; "
            f"pass {name}.contiguous()"
        )
    if len(got) == 1 and not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")


def _fits(got: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether sizes are those of `shape`, where -1 admits any. Called a dozen times for each op."""
    if len(got) != len(shape):
        return False
    for mine, needed in zip(got, shape, strict=True):
        if mine != needed and needed != -1:
            return False
    return True


def check_attention_inputs(
    q: Tensor, k: Tensor, v: Tensor, kv_begin: Tensor, kv_end: Tensor
) -> None:
    """Checks what forward and backward of partial attention both take.

    Raises:
        ValueError: shapes, dtypes, devices or strides disagree.
    """
    device = q.device
    check_tensor("q", q, shape=(-1, -1, -1), dtypes=INPUT_DTYPES, device=device)
    num_rows, num_heads_q, head_dim_qk = q.shape
    check_tensor("k", k, shape=(-1, -1, head_dim_qk), dtypes=(q.dtype,), device=device)
    num_keys, num_heads_kv, _ = k.shape
    check_tensor("v", v, shape=(num_keys, num_heads_kv, -1), dtypes=(q.dtype,), device=device)
    int32 = (torch.int32,)
    check_tensor("kv_begin", kv_begin, shape=(num_rows,), dtypes=int32, device=device)
    check_tensor("kv_end", kv_end, shape=(num_rows,), dtypes=int32, device=device)
    if num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            f"q has {num_heads_q} heads, needs a multiple of the {num_heads_kv} heads of k and v"
        )
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {tensor.shape[-1]}, needs 1 to {MAX_HEAD_DIM}")


def check_slots(
    part_ptr: Tensor, part_slots: Tensor, *, num_rows: int, device: torch.device
) -> None:
    """Checks which partials belong to which of `num_rows` rows: int32 CSR.

    Raises:
        ValueError: wrong shapes, dtypes or devices.
    """
    int32 = (torch.int32,)
    check_tensor("part_ptr", part_ptr, shape=(num_rows + 1,), dtypes=int32, device=device)
    check_tensor("part_slots", part_slots, shape=(-1,), dtypes=int32, device=device)


def check_no_grad(op: str, **tensors: Tensor) -> None:
    """Refuses to lose a gradient in silence: the ops have none of their own.

    Raises:
        ValueError: gradients are being recorded and one of the tensors requires one.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(
                f"{op} got {name} with requires_grad=True, but the gradient of a partial needs the "
                "merged result; call megatron_splitkv.splitkv_attention, or use torch.no_grad()"
            )


def refusal(op: str, tensor: Tensor, twin: str | None = None) -> UnsupportedError:
    """The error of an op on a device for which no kernel is registered.

    Args:
        op: its name.
        tensor: one of those that it got.
        twin: its name in `reference.py`; None where that is the op's own.
    """
    return UnsupportedError(
        f"{op} got tensors on {tensor.device}, needs a device with kernels, CPU or CUDA; move "
        f"the tensors there or use megatron_splitkv.ops.reference.{twin or op}"
    )


Rows = _kernels.Rows


def rows_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Rows:
    """A `[rows, heads, dim]` or `[rows, heads]` tensor as the kernels see it; strides in elements.

    The native functions take it in place of a tensor. It holds an address alone.
    """
    return Rows(address, native_dtype(dtype), shape, strides)


def written_by_kernel(tensor: Tensor) -> Tensor:
    """Where a kernel that need not accumulate writes a result: the CPU kernels know fp32 alone."""
    if tensor.is_cuda or tensor.dtype == torch.float32:
        return tensor
    return torch.empty_like(tensor, dtype=torch.float32)


def as_address(tensor: Tensor | None) -> int:
    """Where the elements lie, 0 for None; the caller keeps the tensor alive while it is used."""
    return 0 if tensor is None else tensor.data_ptr()


def native_dtype(dtype: torch.dtype) -> _kernels.DType:
    """An element type as the kernels name it."""
    return _NATIVE_DTYPES[dtype]


def native_device(device: torch.device) -> _kernels.Device:
    """Which of the two backends runs for a device."""
    return _NATIVE_DEVICES[device.type]


def launch_on(device: torch.device, workspace: Tensor | None = None) -> _kernels.Launch:
    """Runs a kernel on the CPU with as many threads as torch uses, or on CUDA's current stream.

    The launch holds an address: the caller keeps `workspace` alive until the op has returned.
    """
    is_cuda = device.type == "cuda"
    return _kernels.Launch(
        device=native_device(device),
        stream=raw_stream(device) if is_cuda else 0,
        workspace=as_address(workspace),
        workspace_bytes=0 if workspace is None else workspace.numel(),
        num_threads=torch.get_num_threads(),
        device_index=device.index if is_cuda else 0,
    )


def raw_stream(device: torch.device) -> int:
    """Handle of CUDA's current stream on a tensor's device, without an object around it."""
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore


def no_outputs(*_args: object, **_kwargs: object) -> None:
    """The fake of an op that only writes into its arguments."""


def register_op(
    op: str,
    schema: str,
    *,
    native: Callable[..., object],
    fake: Callable[..., object],
    twin: str | None = None,
) -> None:
    """Defines an op that runs on the CPU and on CUDA, and is refused by name elsewhere.

    Args:
        op: its name, without the namespace.
        schema: its arguments and results, as torch.library writes them.
        native: runs it, on tensors of either device.
        fake: gives the results without their values.
        twin: its name in `reference.py`; None where that is the op's own.
    """
    name = f"{OP_NAMESPACE}::{op}"

    def refuse(first: Tensor, *_args: object, **_kwargs: object) -> NoReturn:
        raise refusal(op, first, twin)

    torch.library.define(name, schema)
    torch.library.register_fake(name, fake)
    torch.library.impl(name, "default", refuse)
    torch.library.impl(name, ("cpu", "cuda"), native)
