"""What a CUDA kernel has to do, worked out on the host once and used by every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels


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
    """Work lists of one partial attention, made from its key intervals.

    Make one for each pair of intervals of a microbatch, while they are still on the host. The lists
    are worked out and uploaded at the first call with given head counts and head dims, and reused
    by the later ones, so that no layer waits for the host.
    """

    __slots__ = ("_forward", "_kv_begin", "_kv_end")

    def __init__(self, kv_begin: Tensor, kv_end: Tensor) -> None:
        """Keeps the intervals.

        Args:
            kv_begin: first visible key of each row, `[Tq]`, int32, on the CPU.
            kv_end: one past the last visible key of each row, `[Tq]`, int32, on the CPU.
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
        self._forward: dict[tuple[object, ...], DeviceWork] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> DeviceWork:
        """The list of `partial_attention` for tensors of these shapes.

        Raises:
            ValueError: q has another number of rows than the intervals, an interval leaves
                `[0, Tk)`, or there is no kernel for the head dims.
        """
        sizes = (len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        key = (*sizes, q.device)
        work = self._forward.get(key)
        if work is None:
            if len(q) != len(self._kv_begin):
                raise ValueError(
                    f"q has {len(q)} rows, but work was made for {len(self._kv_begin)}"
                )
            work = _upload(self._build_forward(*sizes, q.device), q.device)
            self._forward[key] = work
        return work

    def _build_forward(
        self,
        num_keys: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim_qk: int,
        head_dim_v: int,
        device: torch.device,
    ) -> _kernels.ForwardWork:
        return _kernels.ForwardWork(
            kv_begin=self._kv_begin.data_ptr(),
            kv_end=self._kv_end.data_ptr(),
            num_rows=len(self._kv_begin),
            num_keys=num_keys,
            num_heads_q=num_heads_q,
            num_heads_kv=num_heads_kv,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_v,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        )


def _upload(work: _kernels.ForwardWork, device: torch.device) -> DeviceWork:
    # Pinned, so that the copy is queued behind what the stream already holds and nobody waits.
    staged = torch.empty(max(work.num_ints, 1), dtype=torch.int32, pin_memory=True)
    work.write(staged.data_ptr())
    items = staged.to(device, non_blocking=True)
    return DeviceWork(items=items, shape=tuple(work.shape))
