"""Transports around a real one: what a rank waits for, and the same step without the wire."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cp_replay import OTHERS, Recorder
from torch import Tensor

from megatron_splitkv.comm import Counts, PassingTransport, Pending, empty_rows


@dataclass
class WaitingTransport(PassingTransport):
    """Passes everything on, and tells a recorder that a rank which waits runs no kernel.

    Attributes:
        recorder: told of each wait.
    """

    recorder: Recorder

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        return self._told(self.inner.exchange(rows, counts))

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        return self._told(self.inner.all_gather(rows))

    def _told(self, pending: Pending) -> Pending:
        def wait() -> Tensor:
            self.recorder.become(OTHERS)
            return pending.wait()

        return Pending(wait)


@dataclass
class SilentTransport(PassingTransport):
    """Can leave the wire out, for timing.

    In a silent step each collective gives what it gave in the recorded one; packing before and
    unpacking after stay. Other steps pass everything on.
    """

    _is_recording: bool = False
    _is_silent: bool = False
    _kept: list[Tensor] = field(default_factory=list)
    _next: int = 0

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        if self._is_silent:
            return empty_rows(int(counts[self.rank].sum()), row_bytes, device)
        return self.inner.send_buffer(counts, row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        return self._collective(lambda: self.inner.exchange(rows, counts))

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        return self._collective(lambda: self.inner.all_gather(rows))

    def restart(self, *, is_recording: bool = False, is_silent: bool = False) -> None:
        """Another step begins."""
        self._next, self._is_recording, self._is_silent = 0, is_recording, is_silent
        if is_recording:
            self._kept.clear()

    def _collective(self, start: Callable[[], Pending]) -> Pending:
        index, self._next = self._next, self._next + 1
        if self._is_silent:
            kept = self._kept[index]
            return Pending(lambda: kept)
        pending = start()
        if not self._is_recording:
            return pending
        kept = pending.wait().clone()
        self._kept.append(kept)
        return Pending(lambda: kept)
