"""Ranks that are threads of one process: the real schedule without processes or a network."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_splitkv.comm.transport import Counts, Pending, empty_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mail:
    """What a rank gives to each other one, and the event after which it may be read."""

    parts: Sequence[Tensor]
    is_written: torch.cuda.Event | None


_NOTHING = _Mail(parts=(), is_written=None)


class ThreadGroup:
    """Ranks of one process, a thread each, on the CPU or on streams of one GPU.

    On a GPU every rank has a stream to compute on, current in its thread, and one to receive on.
    Events order them; the host waits only for the other threads to get as far.
    """

    def __init__(
        self, size: int, timeout_s: float = 60.0, device: torch.device | str = "cpu"
    ) -> None:
        """Makes `size` ranks; a collective that misses one for `timeout_s` raises on the rest."""
        self.size = size
        self.device = torch.device(device)
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._mail = [_NOTHING] * size
        self._streams: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []
        if self.device.type == "cuda":
            self._streams = [
                (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
                for _ in range(size)
            ]

    def receiving_stream(self, rank: int) -> torch.cuda.Stream:
        """On a GPU, where `rank` receives beside its own stream."""
        return self._streams[rank][1]

    def swap(
        self, rank: int, outgoing: Sequence[Tensor], received: Tensor, targets: Sequence[Tensor]
    ) -> Pending:
        """Gives `outgoing[r]` to each rank r, and copies what they gave to `rank` to `targets`.

        Args:
            rank: the calling rank.
            outgoing: one tensor for each rank.
            received: the buffer of the targets.
            targets: where the tensor of each rank goes, views of `received`.
        Returns:
            Pending `received`.
        """
        self._mail[rank] = _Mail(parts=outgoing, is_written=self._recorded_event())
        self._barrier.wait()
        is_received = self._receive(rank, received, targets)
        self._barrier.wait()
        self._mail[rank] = _NOTHING  # nobody but the caller holds what it sent

        def finish() -> Tensor:
            if is_received is not None:
                torch.cuda.current_stream(self.device).wait_event(is_received)
            return received

        return Pending(finish)

    def _receive(
        self, rank: int, received: Tensor, targets: Sequence[Tensor]
    ) -> torch.cuda.Event | None:
        """Copies what all gave to `rank`; on a GPU beside its stream, until the event."""
        if not self._streams:
            for mail, target in zip(self._mail, targets, strict=True):
                _copy(mail.parts[rank], target)
            return None
        stream = self.receiving_stream(rank)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # it owns the targets' memory
        with torch.cuda.stream(stream):
            for mail, target in zip(self._mail, targets, strict=True):
                assert mail.is_written is not None, "ranks of a GPU leave an event"
                stream.wait_event(mail.is_written)
                _copy(mail.parts[rank], target)
                mail.parts[rank].record_stream(stream)  # its sender may drop it before the copy
            received.record_stream(stream)
            return self._recorded_event()

    def _recorded_event(self) -> torch.cuda.Event | None:
        """An event behind what the current stream holds; None on the CPU."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def run[T](self, body: Callable[["ThreadTransport"], T]) -> list[T]:
        """Runs `body` once for each rank, all at once; returns their results in rank order.

        The group can be used again, also after an error.

        Raises:
            Exception: the first error of any rank; the others are released by the barrier.
        """
        results: list[T | None] = [None] * self.size
        errors: list[Exception] = []

        def run_rank(rank: int) -> None:
            stream = torch.cuda.stream(self._streams[rank][0]) if self._streams else nullcontext()
            try:
                # Else one thread of autograd's would run the backward of all ranks in turn, and
                # wait in the first one's collective for the others.
                with stream, torch.autograd.set_multithreading_enabled(False):
                    results[rank] = body(ThreadTransport(group=self, rank=rank))
            except Exception as error:
                if not isinstance(error, threading.BrokenBarrierError) or not errors:
                    errors.append(error)
                self._barrier.abort()

        for computing, _ in self._streams:
            computing.wait_stream(torch.cuda.current_stream(self.device))
        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._settle()
        if errors:
            raise next(
                (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
            )
        return results  # type: ignore[return-value]

    def _settle(self) -> None:
        """Leaves nothing in flight, nothing held and the barrier whole."""
        if self._streams:
            torch.cuda.synchronize(self.device)
        self._mail = [_NOTHING] * self.size
        self._barrier.reset()


def _copy(part: Tensor, target: Tensor) -> None:
    assert part.shape == target.shape, "exchange tables disagree"
    target.copy_(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTransport:
    """One rank of a `ThreadGroup`.

    Attributes:
        group: the ranks of this process.
        rank: rank inside it.
    """

    group: ThreadGroup
    rank: int

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        return empty_rows(int(counts[self.rank].sum()), row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        sent, coming = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        received = rows.new_empty(sum(coming), rows.shape[1])
        return self.group.swap(self.rank, rows.split(sent), received, received.split(coming))

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        gathered = rows.new_empty(self.size, *rows.shape)
        return self.group.swap(self.rank, [rows] * self.size, gathered, gathered.unbind(0))
