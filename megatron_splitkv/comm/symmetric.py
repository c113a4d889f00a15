"""A transport inside one host: copy engines pull rows out of each other's memory.

A collective on a rank, which nothing but copy engines and the front end of the GPU carry out, so
that attention keeps every SM:

    stream of the caller   wait until the place is free | copy rows into the own buffer | flags:
                           they are ready
    stream of its own      for each source: wait for its flag | pull its rows | flag: done with them

The buffers are symmetric memory of torch (`torch.distributed._symmetric_memory`): every rank has
mapped those of the others. All ranks know all counts, so all give a collective the same place.
A rank that stalls holds back the streams of the others, until whatever watches over them, such as
the timeout of an NCCL collective behind it, ends the process.
"""

import socket
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_splitkv.comm.regions import Regions
from megatron_splitkv.comm.stream_flags import FLAG_BYTES, wait_for_flag, write_flag
from megatron_splitkv.comm.transport import Counts, Pending

# Collectives that are in flight at once in `attention.py`: two gathers and a return.
NUM_IN_FLIGHT = 3
GRANULE_BYTES = 1 << 24  # a buffer is a multiple of it, so that it seldom grows


class SymmetricTransport:
    """Ranks of one host, a GPU each, that read each other's memory; see the module."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Maps the memory of the group; all its ranks must call it together.

        Args:
            group: the context-parallel group, of any backend.
            device: of this rank, another one for each rank.
        Raises:
            ValueError: on every rank, when they cannot read each other's memory.
        """
        refuse_group(group, device)
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device)
        self._number = 0  # of the last collective
        self._unawaited: dict[int, Tensor] = {}  # must outlive the pull, also if nobody waits
        # In the memory of each rank, for each peer: the number of the last collective that it has
        # made ready, and of the last that it is done with.
        self._flags = self._mapped(2 * self.size * FLAG_BYTES)
        self._flags.of[self.rank].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        self._regions = Regions(0)
        self._buffers = _Mapped(of=(), handle=None)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        row_bytes = rows.shape[1]
        coming = counts[:, self.rank].tolist()
        received = rows.new_empty(sum(coming), row_bytes)
        targets = received.split(coming)
        size, begins = places_of(counts, self.rank, row_bytes)
        own = begins[self.rank] // row_bytes
        targets[self.rank].copy_(rows[own : own + coming[self.rank]])
        return self._collective(
            rows,
            received,
            targets,
            begins,
            size=size,
            readers=np.flatnonzero(counts[self.rank]).tolist(),
        )

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        received = rows.new_empty(self.size, *rows.shape)
        received[self.rank].copy_(rows)
        return self._collective(
            rows,
            received,
            received.unbind(0),
            [0] * self.size,
            size=rows.numel(),
            readers=range(self.size) if len(rows) else (),
        )

    def _collective(
        self,
        rows: Tensor,
        received: Tensor,
        targets: Sequence[Tensor],
        begins: Sequence[int],
        *,
        size: int,
        readers: Sequence[int],
    ) -> Pending:
        """Shows `rows` to the readers and pulls what the others show.

        Args:
            rows: to be read by others, contiguous.
            received: the buffer of the targets.
            targets: where the rows of each other rank go, contiguous views of `received`.
            begins: first byte of these in what that rank shows.
            size: bytes of a region that holds the rows of any rank.
            readers: ranks that pull from this one.
        """
        self._number += 1
        number, stream = self._number, self._stream
        place = self._show(rows, size, [reader for reader in readers if reader != self.rank])
        # It owns the memory of `received`.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for step in range(1, self.size):
                source = (self.rank + step) % self.size  # not all ranks at one source
                target = targets[source].view(-1)
                if len(target) == 0:
                    continue
                begin = place + begins[source]
                wait_for_flag(stream, self._flag(self.rank, source), number)
                target.copy_(self._buffers.of[source][begin : begin + len(target)])
                write_flag(stream, self._flag(source, self.size + self.rank), number)
            is_received = stream.record_event()
        self._unawaited[number] = received

        def finish() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(is_received)
            return self._unawaited.pop(number, received)

        return Pending(finish)

    def _show(self, rows: Tensor, size: int, readers: Sequence[int]) -> int:
        """Copies rows into the own buffer and tells the readers; returns the place."""
        stream = torch.cuda.current_stream(self._device)
        if NUM_IN_FLIGHT * size > self._regions.capacity:
            self._grow(NUM_IN_FLIGHT * size)
        place, waits = self._regions.take(size, self._number, readers)
        self._wait_until_done(stream, waits)
        self._buffers.of[self.rank][place : place + rows.numel()].copy_(rows.view(-1))
        for reader in readers:
            write_flag(stream, self._flag(reader, self.rank), self._number)
        return place

    def _wait_until_done(self, stream: torch.cuda.Stream, waits: dict[int, int]) -> None:
        """Until each rank has read the rows of that collective."""
        for reader, number in waits.items():
            wait_for_flag(stream, self._flag(self.rank, self.size + reader), number)

    def _grow(self, capacity: int) -> None:
        """Takes larger buffers, on all ranks alike; the one place that waits for the device."""
        self._wait_until_done(torch.cuda.current_stream(self._device), self._regions.pending())
        torch.cuda.synchronize(self._device)
        self._buffers = _Mapped(of=(), handle=None)  # before the larger ones are taken
        capacity = -(-capacity // GRANULE_BYTES) * GRANULE_BYTES
        self._buffers = self._mapped(capacity)
        self._regions = Regions(capacity)

    def _flag(self, rank: int, index: int) -> int:
        """Address of a flag in the memory of a rank."""
        return self._flags.of[rank].data_ptr() + index * FLAG_BYTES

    def _mapped(self, num_bytes: int) -> "_Mapped":
        """A buffer of each rank, `[num_bytes]` uint8; all ranks must call it together."""
        own = symm_mem.empty(num_bytes, dtype=torch.uint8, device=self._device)
        handle = symm_mem.rendezvous(own, self._group)
        of = [
            own if rank == self.rank else handle.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(self.size)
        ]
        return _Mapped(of=of, handle=handle)


class _Mapped(NamedTuple):
    """A buffer of each rank, and what keeps those of the others mapped."""

    of: Sequence[Tensor]
    handle: object


def places_of(counts: Counts, rank: int, row_bytes: int) -> tuple[int, list[int]]:
    """How large the regions of an exchange are, and where in that of each rank the rows begin that
    are for this one, in bytes.
    """
    begins = (np.cumsum(counts, axis=1) - counts)[:, rank] * row_bytes
    return int(counts.sum(axis=1).max()) * row_bytes, begins.tolist()


def refuse_group(group: ProcessGroup, device: torch.device) -> None:
    """Stops a group whose ranks cannot read each other's memory; all its ranks must call it.

    Raises:
        ValueError: on every rank.
    """
    if device.type != "cuda":
        raise ValueError(
            f"transport='symmetric' moves rows between GPUs, but the tensors are on {device.type}; "
            "take transport auto"
        )
    everyone: list[tuple[str, str]] = [("", "")] * group.size()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    dist.all_gather_object(everyone, (socket.gethostname(), uuid), group)
    hosts, devices = (set(values) for values in zip(*everyone, strict=True))
    if len(hosts) > 1:
        raise ValueError(
            f"transport='symmetric' needs all context-parallel ranks on one host, got "
            f"{', '.join(sorted(hosts))}; take transport auto"
        )
    if len(devices) < group.size():
        raise ValueError(
            f"transport='symmetric' needs a GPU for each context-parallel rank, got {len(devices)} "
            f"for {group.size()}; take transport auto or gloo"
        )
