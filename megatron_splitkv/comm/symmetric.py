"""A transport inside one host: copy engines pull rows out of each other's memory.

A collective on a rank, which nothing but copy engines and the front end of the GPU carry out, so
that attention keeps every SM:

    stream of the caller   wait until the place is free | rows are packed there | flags: they are
                           ready
    stream of its own      for each source: wait for its flag | pull its rows | flag: done with them

The buffers are symmetric memory of torch (`torch.distributed._symmetric_memory`): every rank has
mapped those of the others. All ranks know all counts, so all give a collective the same place.
A rank that stalls holds back the streams of the others; after the timeout of the group their
processes end.
"""

import socket
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_splitkv.comm.regions import Regions
from megatron_splitkv.comm.stream_ops import (
    FLAG_BYTES,
    copy_bytes,
    wait_for_flag,
    write_flag,
)
from megatron_splitkv.comm.transport import Counts, Pending
from megatron_splitkv.comm.watchdog import Watchdog
from megatron_splitkv.errors import UnsupportedError

# Collectives that are in flight at once in `attention.py`: two gathers and a return.
NUM_IN_FLIGHT = 3
# A buffer that grows takes as much more: the first rows are of a forward pass, and those of the
# backward pass are twice as wide.
ROOM_TO_GROW = 2
FIRST_BYTES = 1 << 24


class SymmetricTransport:
    """Ranks of one host, a GPU each, that read each other's memory; see the module.

    It cannot be used again after an error inside a call.
    """

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
        self._caller = torch.cuda.current_stream(device)  # of the last one
        self._unawaited: dict[int, Tensor] = {}  # must outlive the pull, also if nobody waits
        # In the memory of each rank, for each peer: the number of the last collective that it has
        # made ready, and of the last that it is done with.
        self._flags = self._mapped(2 * self.size * FLAG_BYTES)
        self._flags.of[self.rank].zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        self._regions = Regions(FIRST_BYTES)
        self._buffers = self._mapped(FIRST_BYTES)
        self._retired: list[_Mapped] = []
        self._watchdog = Watchdog(
            f"symmetric memory of rank {self.rank}", _timeout_s(group, device)
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this GPU that hold what is sent; torch's figures of memory leave them out."""
        buffers = [*self._retired, self._buffers]
        return sum(buffer.of[self.rank].numel() for buffer in buffers)

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        size, _, _ = places_of(counts, self.rank, row_bytes)
        place = self._take(size, np.flatnonzero(counts[self.rank]).tolist())
        self._prepared = place
        num_rows = int(counts[self.rank].sum())
        return self._at(place, num_rows * row_bytes).view(num_rows, row_bytes)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        row_bytes = rows.shape[1]
        size, begins, coming = places_of(counts, self.rank, row_bytes)
        received = rows.new_empty(sum(coming) // row_bytes, row_bytes)
        stream = torch.cuda.current_stream(self._device)
        target, own = received.data_ptr() + sum(coming[: self.rank]), begins[self.rank]
        if coming[self.rank]:
            copy_bytes(stream, target, rows.data_ptr() + own, coming[self.rank])
        place, self._prepared = self._prepared, None
        if place is None:
            place = self._take(size, np.flatnonzero(counts[self.rank]).tolist())
            self._at(place, rows.numel()).copy_(rows.view(-1))
        return self._collective(place, received, begins, coming)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        received = rows.new_empty(self.size, *rows.shape)
        received[self.rank].copy_(rows)
        each = rows.numel()
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        place = self._take(each, range(self.size) if each else ())
        self._at(place, each).copy_(rows.view(-1))
        return self._collective(place, received, [0] * self.size, [each] * self.size)

    def _collective(
        self, place: "_Place", received: Tensor, begins: Sequence[int], coming: Sequence[int]
    ) -> Pending:
        """Tells the readers of what lies in the place, and pulls what the others show.

        Args:
            place: where the rows are, here and on all ranks.
            received: memory for the rows of each rank, in rank order; the own ones are there.
            begins: first byte in the place of each rank of what is pulled from it.
            coming: bytes of it.
        """
        mine, stream = torch.cuda.current_stream(self._device), self._stream
        for reader in place.readers:
            write_flag(mine, self._flag(reader, self.rank), place.number)
        stream.wait_stream(mine)  # it owns the memory of `received`
        targets = [received.data_ptr() + before for before in accumulate(coming, initial=0)]
        for step in range(1, self.size):
            source = (self.rank + step) % self.size  # not all ranks at one source
            if coming[source] == 0:
                continue
            shown = self._buffers.of[source].data_ptr() + place.begin + begins[source]
            wait_for_flag(stream, self._flag(self.rank, source), place.number)
            copy_bytes(stream, targets[source], shown, coming[source])
            write_flag(stream, self._flag(source, self.size + self.rank), place.number)
        is_received = stream.record_event()
        self._watchdog.watch(is_received)
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
        Raises:
            UnsupportedError: a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "transport='symmetric' cannot be captured in a CUDA graph, as its flags count up; "
                "take transport nccl"
            )
        stream = torch.cuda.current_stream(self._device)
        if stream != self._caller:  # what was waited for was waited for there
            stream.wait_stream(self._caller)
            self._caller = stream
        self._number += 1
        if NUM_IN_FLIGHT * size > self._regions.capacity:
            self._grow(ROOM_TO_GROW * NUM_IN_FLIGHT * size)
        others = tuple(reader for reader in readers if reader != self.rank)
        begin, waits = self._regions.take(size, self._number, others)
        for reader, number in waits.items():
            wait_for_flag(stream, self._flag(self.rank, self.size + reader), number)
        return _Place(begin=begin, number=self._number, readers=others)

    def _at(self, place: "_Place", num_bytes: int) -> Tensor:
        """The own rows in a place, `[num_bytes]` uint8."""
        return self._buffers.of[self.rank][place.begin : place.begin + num_bytes]

    def _grow(self, capacity: int) -> None:
        """Takes larger buffers, on all ranks alike.

        The smaller ones stay: others may still read there, and to free them would wait for all
        streams of the device, also for a receive whose sender waits in turn for this host.
        """
        self._retired.append(self._buffers)
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


def places_of(counts: Counts, rank: int, row_bytes: int) -> tuple[int, list[int], list[int]]:
    """Where the rows of an exchange lie, in bytes.

    Returns:
        The size of a region that holds those of any rank; where in the region of each rank begins
        what is for this one; and how much that is.
    """
    begins = counts[:, :rank].sum(axis=1) * row_bytes
    coming = counts[:, rank] * row_bytes
    return int(counts.sum(axis=1).max()) * row_bytes, begins.tolist(), coming.tolist()


def reason_against(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot read each other's memory, the same on all of them; None if they can.

    All ranks of the group must call it together.
    """
    if device.type != "cuda":
        return f"it moves rows between GPUs, but the tensors are on {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = _uuid(index)
    everyone = _gathered((_host(), uuid, index), group)
    hosts, devices, indices = zip(*everyone, strict=True)
    if len({*hosts}) > 1:
        names = ", ".join(sorted({name for name, _ in hosts}))
        return f"it needs all context-parallel ranks on one host, got {len({*hosts})}: {names}"
    if len({*devices}) < group.size():
        return (
            f"it needs a GPU for each context-parallel rank, got {len({*devices})} for "
            f"{group.size()}"
        )
    if len({*indices}) < group.size():
        return (
            f"it needs processes that see each other's GPUs, but theirs are numbered "
            f"{list(indices)}; do not hide GPUs by CUDA_VISIBLE_DEVICES"
        )
    peers = [i for i in range(torch.cuda.device_count()) if _uuid(i) in {*devices} - {uuid}]
    is_cut_off = not all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
    cut_off = [rank for rank, is_so in enumerate(_gathered(is_cut_off, group)) if is_so]
    return f"ranks {cut_off} cannot read the memory of all the others' GPUs" if cut_off else None


def _gathered[T](value: T, group: ProcessGroup) -> list[T]:
    """The value of every rank."""
    values: list[T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values  # type: ignore[return-value]


def _timeout_s(group: ProcessGroup, device: torch.device) -> float:
    """Of the collectives of a group."""
    backend = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()  # pyright: ignore[reportPrivateUsage]


def _host() -> tuple[str, str]:
    """Name and boot of this host: containers of several may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


def _uuid(device_index: int) -> str:
    return str(torch.cuda.get_device_properties(device_index).uuid)
