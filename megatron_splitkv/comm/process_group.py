"""Transports over a `torch.distributed` process group."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_splitkv.comm.symmetric import SymmetricTransport, reason_against
from megatron_splitkv.comm.transport import Counts, Pending, Transport, empty_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupTransport:
    """Collectives on the tensors where they are: NCCL on GPUs, gloo on the CPU.

    Attributes:
        group: the context-parallel group.
    """

    group: ProcessGroup

    @property
    def rank(self) -> int:
        """Rank inside the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        return empty_rows(int(counts[self.rank].sum()), row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        sent, coming = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        received = _empty_like(rows, sum(coming))
        work = dist.all_to_all_single(received, rows, coming, sent, group=self.group, async_op=True)
        return _pending(received, work)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        gathered = _empty_like(rows, self.size * len(rows))
        work = dist.all_gather_into_tensor(gathered, rows, group=self.group, async_op=True)
        return _pending(gathered.view(self.size, *rows.shape), work)


def _empty_like(rows: Tensor, num_rows: int) -> Tensor:
    """Pinned where `rows` are, for whoever copies from there to a GPU without waiting."""
    return rows.new_empty(num_rows, rows.shape[1], pin_memory=rows.is_pinned())


def _pending(tensor: Tensor, work: dist.Work | None) -> Pending:
    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return tensor

    return Pending(finish)


class HostStagedTransport:
    """Collectives of a CPU backend on rows of a GPU, by way of pinned host memory.

    It lets several processes share one GPU, which NCCL refuses. Copies run on a stream of their
    own; one worker thread waits for them and calls the collectives, in the order in which they were
    started, so that the caller queues further work meanwhile. Every collective must be waited for
    before the group is used otherwise.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Stages for tensors on `device`; `group` must have a backend for the CPU."""
        self._inner = ProcessGroupTransport(group=group)
        self._stream = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="splitkv-staging")

    @property
    def rank(self) -> int:
        """Rank inside the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._inner.size

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        return empty_rows(int(counts[self.rank].sum()), row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        received = rows.new_empty(int(counts[:, self.rank].sum()), rows.shape[1])
        return self._staged(rows, received, lambda host: self._inner.exchange(host, counts))

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        received = rows.new_empty(self.size, *rows.shape)
        return self._staged(rows, received, self._inner.all_gather)

    def _staged(
        self, rows: Tensor, received: Tensor, collective: Callable[[Tensor], Pending]
    ) -> Pending:
        stream, on_host = self._stream, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            on_host.record()
        # The caller may drop the one before it is copied, the other if it never waits.
        rows.record_stream(stream)
        received.record_stream(stream)

        def carry() -> torch.cuda.Event:
            on_host.synchronize()
            arrived = collective(host).wait()
            is_received = torch.cuda.Event()
            with torch.cuda.stream(stream):
                received.copy_(arrived, non_blocking=True)
                is_received.record()
            return is_received

        done = self._worker.submit(carry)

        def finish() -> Tensor:
            torch.cuda.current_stream(received.device).wait_event(done.result())
            return received

        return Pending(finish)


def transport_of(
    group: ProcessGroup, device: torch.device, choice: str = "auto"
) -> Transport | None:
    """The group as a transport for tensors on `device`; None for a group of one.

    All ranks of the group must call it together. "auto" is symmetric memory where the GPUs of an
    NCCL group can read each other's, else the backend of the group.

    Args:
        group: the context-parallel group.
        device: where the tensors are.
        choice: `SplitKVConfig.transport`.
    Raises:
        ValueError: the group has no such backend, or on a GPU only gloo and nobody asked for it, or
            its ranks cannot read each other's memory, which was asked for.
    """
    if group.size() == 1:
        return None
    if choice == "symmetric":
        reason = reason_against(group, device)
        if reason is not None:
            raise ValueError(f"transport='symmetric': {reason}; take transport auto")
        return SymmetricTransport(group, device)
    backends = _backends(group)
    backend = backends.get(device.type, "none")
    if device.type == "cuda" and choice == "gloo" and backends.get("cpu") == "gloo":
        return HostStagedTransport(group, device)
    if choice not in ("auto", backend):
        raise ValueError(
            f"transport={choice!r} needs a process group with that backend, got {backend} for "
            f"tensors on {device.type}; give --distributed-backend {choice}, or take transport auto"
        )
    if (device.type, backend) == ("cuda", "gloo"):
        raise ValueError(
            "the context-parallel group communicates by gloo, but its tensors are on a GPU; give "
            "--distributed-backend nccl, or --splitkv-transport gloo to stage all rows through "
            "host memory, which is slow and meant for several processes on one GPU"
        )
    if (choice, backend) == ("auto", "nccl") and reason_against(group, device) is None:
        return SymmetricTransport(group, device)
    return ProcessGroupTransport(group=group)


def _backends(group: ProcessGroup) -> dict[str, str]:
    """Backend of each device type, as in `{"cpu": "gloo", "cuda": "nccl"}`."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, backend in pairs}
