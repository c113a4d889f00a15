"""What a CUDA kernel has to do, worked out on the host once and used by every layer."""

from dataclasses import dataclass
from functools import cache
from typing import TypedDict

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels


@cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; asked for once."""
    return torch.cuda.get_device_capability(device)


def kernel_family(device: torch.device) -> str:
    """Which kernels run on a CUDA device: "sm90" on Hopper, "sm80" elsewhere or when forced.

    Raises:
        ValueError: compute capability below 8.0.
    """
    return _kernels.cuda_family(*device_capability(device))


class _Request(TypedDict):
    kv_begin: int
    kv_end: int
    num_rows: int
    num_keys: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    num_sms: int
    family: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceWork:
    """A work list on the device, as the ops take it.

    Attributes:
        items: `[num_ints]` int32, read by the kernels alone.
        shape: sizes of the list, and of the call that it was made for.
    """

    items: Tensor
    shape: tuple[int, ...]


class WorkLists:
    """Work lists of one partial attention and its backward, made from the key intervals.

    Make one for each pair of intervals of a microbatch, while they are still on the host. The lists
    are worked out and uploaded at the first call with given head counts and head dims, and reused
    by the later ones, so that no layer waits for the host.
    """

    __slots__ = ("_backward", "_forward", "_is_deterministic", "_kv_begin", "_kv_end")

    def __init__(self, kv_begin: Tensor, kv_end: Tensor, *, is_deterministic: bool = False) -> None:
        """Keeps the intervals.

        Args:
            kv_begin: first visible key of each row, `[Tq]`, int32, on the CPU.
            kv_end: one past the last visible key of each row, `[Tq]`, int32, on the CPU.
            is_deterministic: dq has the same bits in each run on Hopper; all other results
                always do.
        Raises:
            ValueError: other shapes, dtypes or devices.
        """
        for name, tensor in (("kv_begin", kv_begin), ("kv_end", kv_end)):
            if tensor.device.type != "cpu" or tensor.dtype != torch.int32 or tensor.dim() != 1:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, needs "
                    f"int32 [rows] on the CPU; pass {name}.cpu()"
                )
        if len(kv_begin) != len(kv_end):
            raise ValueError(f"kv_begin has {len(kv_begin)} rows, kv_end has {len(kv_end)}")
        self._kv_begin = kv_begin.contiguous()
        self._kv_end = kv_end.contiguous()
        self._is_deterministic = is_deterministic
        self._forward: dict[tuple[object, ...], DeviceWork] = {}
        self._backward: dict[tuple[object, ...], DeviceWork] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> DeviceWork:
        """The list of `partial_attention` for tensors of these shapes.

        Raises:
            ValueError: q has another number of rows than the intervals, an interval leaves
                `[0, Tk)`, or there is no kernel for the head dims.
        """
        key = _key(q, k, v)
        work = self._forward.get(key)
        if work is None:
            request = self._request(q, k, v)
            work = _upload(_kernels.ForwardWork(**request), q.device)
            self._forward[key] = work
        return work

    def backward(self, q: Tensor, k: Tensor, v: Tensor) -> DeviceWork:
        """The list of `partial_attention_backward` for tensors of these shapes.

        Raises:
            ValueError: as in `forward`.
        """
        key = _key(q, k, v)
        work = self._backward.get(key)
        if work is None:
            request = self._request(q, k, v)
            native = _kernels.BackwardWork(**request, is_deterministic=self._is_deterministic)
            work = _upload(native, q.device)
            self._backward[key] = work
        return work

    def _request(self, q: Tensor, k: Tensor, v: Tensor) -> _Request:
        if len(q) != len(self._kv_begin):
            raise ValueError(f"q has {len(q)} rows, but work was made for {len(self._kv_begin)}")
        return {
            "kv_begin": self._kv_begin.data_ptr(),
            "kv_end": self._kv_end.data_ptr(),
            "num_rows": len(q),
            "num_keys": len(k),
            "num_heads_q": q.shape[1],
            "num_heads_kv": k.shape[1],
            "head_dim_qk": q.shape[2],
            "head_dim_v": v.shape[2],
            "num_sms": torch.cuda.get_device_properties(q.device).multi_processor_count,
            "family": kernel_family(q.device),
        }


def _key(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    return q.shape, k.shape, v.shape, q.device, kernel_family(q.device)


def _upload(work: _kernels.ForwardWork | _kernels.BackwardWork, device: torch.device) -> DeviceWork:
    # Pinned, so that the copy is queued behind what the stream already holds and nobody waits.
    staged = torch.empty(max(work.num_ints, 1), dtype=torch.int32, pin_memory=True)
    work.write(staged.data_ptr())
    items = staged.to(device, non_blocking=True)
    return DeviceWork(items=items, shape=tuple(work.shape))
