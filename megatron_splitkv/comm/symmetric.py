"""A transport inside one host: copy engines pull rows out of each other's memory.

A collective on a rank, which nothing but copy engines and the front end of the GPU carry out, so
that attention keeps every SM:

    stream of the caller   wait until the place is free | rows are packed there | flags: they are
                           ready
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
            group: the context-parallel group, of any backend, with no `reason_against` it.
            device: of this rank.
        """
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device)
        self._number = 0  # of the last collective
        self._prepared: _Place | None = None  # of the next one, if it asked for a send buffer
        self._unawaited: dict[int, Tensor] = {}  # must outlive the pull, also if nobody waits
        # In the memory of each rank, for each peer: the number of the last collective that it has
        # made ready, and of the last that it is done with.
        self._flags = self._mapped(2 * self.size * FLAG_BYTES)
        self._flags.of[self.rank].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        self._regions = Regions(0)
        self._buffers = _Mapped(of=(), handle=None)

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        size, _ = places_of(counts, self.rank, row_bytes)
        place = self._take(size, np.flatnonzero(counts[self.rank]).tolist())
        self._prepared = place
        num_rows = int(counts[self.rank].sum())
        return self._at(place, num_rows * row_bytes).view(num_rows, row_bytes)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        row_bytes = rows.shape[1]
        coming = counts[:, self.rank].tolist()
        received = rows.new_empty(sum(coming), row_bytes)
        targets = received.split(coming)
        size, begins = places_of(counts, self.rank, row_bytes)
        own = begins[self.rank] // row_bytes
        targets[self.rank].copy_(rows[own : own + coming[self.rank]])
        place, self._prepared = self._prepared, None
        if place is None:
            place = self._take(size, np.flatnonzero(counts[self.rank]).tolist())
            self._at(place, rows.numel()).copy_(rows.view(-1))
        return self._collective(place, received, targets, begins)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        received = rows.new_empty(self.size, *rows.shape)
        received[self.rank].copy_(rows)
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        place = self._take(rows.numel(), range(self.size) if len(rows) else ())
        self._at(place, rows.numel()).copy_(rows.view(-1))
        return self._collective(place, received, received.unbind(0), [0] * self.size)

    def _collective(
        self, place: "_Place", received: Tensor, targets: Sequence[Tensor], begins: Sequence[int]
    ) -> Pending:
        """Tells the readers of what lies in the place, and pulls what the others show.

        Args:
            place: where the rows are, here and on all ranks.
            received: the buffer of the targets.
            targets: where the rows of each other rank go, contiguous views of `received`.
            begins: first byte of these in the place of that rank.
        """
        mine, stream = torch.cuda.current_stream(self._device), self._stream
        for reader in place.readers:
            write_flag(mine, self._flag(reader, self.rank), place.number)
        stream.wait_stream(mine)  # it owns the memory of `received`
        with torch.cuda.stream(stream):
            for step in range(1, self.size):
                source = (self.rank + step) % self.size  # not all ranks at one source
                target = targets[source].view(-1)
                if len(target) == 0:
                    continue
                begin = place.begin + begins[source]
                wait_for_flag(stream, self._flag(self.rank, source), place.number)
                target.copy_(self._buffers.of[source][begin : begin + len(target)])
                write_flag(stream, self._flag(source, self.size + self.rank), place.number)
            is_received = stream.record_event()
        self._unawaited[place.number] = received

        def finish() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(is_received)
            return self._unawaited.pop(place.number, received)

        return Pending(finish)

    def _take(self, size: int, readers: Sequence[int]) -> "_Place":
        """A place in the buffers for the next collective, once nobody reads there any more.

        Args:
            size: bytes that hold the rows of any rank.
            readers: ranks that pull from this one.
        """
        self._number += 1
        if NUM_IN_FLIGHT * size > self._regions.capacity:
            self._grow(NUM_IN_FLIGHT * size)
        others = tuple(reader for reader in readers if reader != self.rank)
        begin, waits = self._regions.take(size, self._number, others)
        self._wait_until_done(waits)
        return _Place(begin=begin, number=self._number, readers=others)

    def _at(self, place: "_Place", num_bytes: int) -> Tensor:
        """The own rows in a place, `[num_bytes]` uint8."""
        return self._buffers.of[self.rank][place.begin : place.begin + num_bytes]

    def _wait_until_done(self, waits: dict[int, int]) -> None:
        """Holds back the current stream until each rank has read the rows of that collective."""
        stream = torch.cuda.current_stream(self._device)
        for reader, number in waits.items():
            wait_for_flag(stream, self._flag(self.rank, self.size + reader), number)

    def _grow(self, capacity: int) -> None:
        """Takes larger buffers, on all ranks alike; the one place that waits for the device."""
        self._wait_until_done(self._regions.pending())
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


class _Place(NamedTuple):
    """Where the rows of a collective lie, on every rank.

    Attributes:
        begin: first byte in the buffers.
        number: of the collective.
        readers: other ranks that pull from this one.
    """

    begin: int
    number: int
    readers: tuple[int, ...]


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


def reason_against(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot read each other's memory, the same on all of them; None if they can.

    All ranks of the group must call it together.
    """
    if device.type != "cuda":
        return f"it moves rows between GPUs, but the tensors are on {device.type}"
    uuid = _uuid(device.index)
    everyone = _gathered((socket.gethostname(), uuid), group)
    hosts, devices = ({values[index] for values in everyone} for index in (0, 1))
    if len(hosts) > 1:
        return f"it needs all context-parallel ranks on one host, got {', '.join(sorted(hosts))}"
    if len(devices) < group.size():
        return (
            f"it needs a GPU for each context-parallel rank, got {len(devices)} for {group.size()}"
        )
    # Of the GPUs that this process sees; where it sees but its own, mapping them will tell.
    peers = [i for i in range(torch.cuda.device_count()) if _uuid(i) in devices - {uuid}]
    is_cut_off = not all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
    cut_off = [rank for rank, is_so in enumerate(_gathered(is_cut_off, group)) if is_so]
    return f"ranks {cut_off} cannot read the memory of all the others' GPUs" if cut_off else None


def _gathered[T](value: T, group: ProcessGroup) -> list[T]:
    """The value of every rank."""
    values: list[T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values  # type: ignore[return-value]


def _uuid(device_index: int | None) -> str:
    index = torch.cuda.current_device() if device_index is None else device_index
    return str(torch.cuda.get_device_properties(index).uuid)
