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
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

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
    has_reached,
    wait_for_flag,
    write_flag,
)
from megatron_splitkv.comm.transport import Counts, Pending
from megatron_splitkv.comm.watchdog import Watchdog
from megatron_splitkv.errors import UnsupportedError

# Of the largest collective a buffer holds so many: a gather and, half as wide, two returns.
NUM_HELD = 2
# A buffer that grows takes as much more: the first rows are of a forward pass, and those of the
# backward pass are twice as wide and 8 bytes.
ROOM_TO_GROW = 2.25
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
        self._group, self._device = group, torch.device("cuda", _index(device))
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
        # Number of the last collective that this rank received all of, where the host can read it.
        self._finished = _host_word()
        finished = self._finished.numpy()
        self._watchdog = Watchdog(
            f"symmetric memory of rank {self.rank}",
            _timeout_s(group, self._device),
            lambda number: has_reached(int(finished[0]), number),
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this GPU that hold what is sent; torch's figures of memory leave them out."""
        buffers = [*self._retired, self._buffers]
        return sum(buffer.of[self.rank].numel() for buffer in buffers)

    def another(self) -> "SymmetricTransport":
        """One for the same ranks, with buffers of its own; all ranks must call it together."""
        return SymmetricTransport(self._group, self._device)

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        place = self._prepared = self._take(places_of(counts, self.rank, row_bytes))
        return self._at(place, place.where.sending // row_bytes, row_bytes)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        row_bytes = rows.shape[1]
        place, self._prepared = self._prepared, None
        if place is None:
            place = self._take(places_of(counts, self.rank, row_bytes))
            self._at(place, *rows.shape).copy_(rows)
        where, mine = place.where, self.rank
        received = rows.new_empty(where.targets[-1] // row_bytes, row_bytes)
        if where.coming[mine]:
            target, own = received.data_ptr() + where.targets[mine], rows.data_ptr()
            copy_bytes(self._caller, target, own + where.begins[mine], where.coming[mine])
        return self._collective(place, received)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        received = rows.new_empty(self.size, *rows.shape)
        received[self.rank].copy_(rows)
        each = rows.numel()
        assert self._prepared is None, "the exchange of a send buffer must follow it"
        readers = [rank for rank in range(self.size) if rank != self.rank and each]
        targets = [each * rank for rank in range(self.size + 1)]
        where = Places(each, each, [0] * self.size, [each] * self.size, targets, readers)
        place = self._take(where)
        self._at(place, *rows.shape).copy_(rows)
        return self._collective(place, received)

    def _collective(self, place: "_Place", received: Tensor) -> Pending:
        """Tells the readers of what lies in the place, and pulls what the others show.

        Args:
            place: where the rows are, here and on all ranks.
            received: memory for the rows of each rank, in rank order; the own ones are there.
        """
        mine, stream = self._caller, self._stream
        coming, begins, targets = place.where.coming, place.where.begins, place.where.targets
        for reader in place.where.readers:
            write_flag(mine, self._flag(reader, self.rank), place.number)
        stream.wait_stream(mine)  # it owns the memory of `received`
        for step in range(1, self.size):
            source = (self.rank + step) % self.size  # not all ranks at one source
            if coming[source] == 0:
                continue
            shown = self._buffers.of[source].data_ptr() + place.begin + begins[source]
            wait_for_flag(stream, self._flag(self.rank, source), place.number)
            copy_bytes(stream, received.data_ptr() + targets[source], shown, coming[source])
            write_flag(stream, self._flag(source, self.size + self.rank), place.number)
        write_flag(stream, self._finished.data_ptr(), place.number)
        self._watchdog.watch(place.number)
        is_received = stream.record_event()
        self._unawaited[place.number] = received

        def finish() -> Tensor:
            self._current_stream().wait_event(is_received)
            return self._unawaited.pop(place.number, received)

        return Pending(finish)

    def _take(self, where: "Places") -> "_Place":
        """A place in the buffers for the next collective, once nobody reads there any more.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "transport='symmetric' cannot be captured in a CUDA graph, as its flags count up; "
                "take transport nccl"
            )
        stream = self._current_stream()
        if stream is not self._caller:  # what was waited for was waited for there
            stream.wait_stream(self._caller)
            self._caller = stream
        self._number += 1
        if NUM_HELD * where.size > self._regions.capacity:
            self._grow(int(ROOM_TO_GROW * NUM_HELD * where.size))
        begin, waits = self._regions.take(where.size, self._number, where.readers)
        for reader, number in waits.items():
            wait_for_flag(stream, self._flag(self.rank, self.size + reader), number)
        return _Place(begin=begin, number=self._number, where=where)

    def _at(self, place: "_Place", num_rows: int, row_bytes: int) -> Tensor:
        """The own rows in a place, `[num_rows, row_bytes]` uint8."""
        own = self._buffers.of[self.rank]
        begin = own.storage_offset() + place.begin
        return own.as_strided((num_rows, row_bytes), (row_bytes, 1), begin)

    def _grow(self, capacity: int) -> None:
        """Takes larger buffers, on all ranks alike.

        The smaller ones stay: others may still read there, and to free them would wait for all
        streams of the device, also for a receive whose sender waits in turn for this host.
        """
        self._retired.append(self._buffers)
        self._buffers = self._mapped(capacity)
        self._regions = Regions(capacity)

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller of the last collective, or whoever else has come now."""
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)  # pyright: ignore
        if raw == self._caller.cuda_stream:
            return self._caller
        return torch.cuda.current_stream(self._device)

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


class Places(NamedTuple):
    """Where the rows of a collective lie in a region of any rank, in bytes.

    Attributes:
        size: what holds the rows of any rank.
        sending: how much of it holds those of this one.
        begins: for each rank, where in its region begins what is for this one.
        coming: how much that is.
        targets: where it goes in what this rank receives, and at last the end of that.
        readers: other ranks that pull from this one.
    """

    size: int
    sending: int
    begins: Sequence[int]
    coming: Sequence[int]
    targets: Sequence[int]
    readers: Sequence[int]


class _Place(NamedTuple):
    """A region of the buffers.

    Attributes:
        begin: its first byte, on every rank.
        number: of the collective.
        where: the rows in it.
    """

    begin: int
    number: int
    where: Places


class _Mapped(NamedTuple):
    """A buffer of each rank, and what keeps those of the others mapped."""

    of: Sequence[Tensor]
    handle: object


def places_of(counts: Counts, rank: int, row_bytes: int) -> Places:
    """Where the rows of an exchange lie for this rank; worked out once for all layers."""
    return _places_of(counts.tobytes(), len(counts), rank, row_bytes)


@lru_cache(maxsize=256)
def _places_of(counts_bytes: bytes, size: int, rank: int, row_bytes: int) -> Places:
    sizes = np.frombuffer(counts_bytes, dtype=np.int64).reshape(size, size) * row_bytes
    coming = sizes[:, rank].tolist()
    return Places(
        size=int(sizes.sum(axis=1).max()),
        sending=int(sizes[rank].sum()),
        begins=tuple(sizes[:, :rank].sum(axis=1).tolist()),
        coming=tuple(coming),
        targets=tuple(accumulate(coming, initial=0)),
        readers=tuple(peer for peer in range(size) if sizes[rank, peer] and peer != rank),
    )


def reason_against(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot read each other's memory, the same on all of them; None if they can.

    All ranks of the group must call it together.
    """
    if device.type != "cuda":
        return f"it moves rows between GPUs, but the tensors are on {device.type}"
    index = _index(device)
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


def _host_word() -> Tensor:
    """A zero that the GPU may write at the address that the host reads, `[1]` int32."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


def _index(device: torch.device) -> int:
    """Number of a device, which may come without it."""
    index = cast("int | None", device.index)
    return torch.cuda.current_device() if index is None else index


def _host() -> tuple[str, str]:
    """Name and boot of this host: containers of several may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ""


def _uuid(device_index: int) -> str:
    return str(torch.cuda.get_device_properties(device_index).uuid)
