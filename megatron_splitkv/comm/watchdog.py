"""Ends a process whose GPU waits for a rank that is gone, as NCCL does for its collectives."""

import os
import sys
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

POLL_S = 1.0


class Event(Protocol):
    """What says whether work of a GPU is done, as `torch.cuda.Event` does."""

    def query(self) -> bool: ...


class _Watched(NamedTuple):
    event: Event
    since: float


class Watchdog:
    """Watches events that come true in the order in which they are given to it."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """Watches nothing yet.

        Args:
            name: of what is watched, for the message.
            timeout_s: an event that takes longer ends the process.
        """
        self._name, self._timeout_s = name, timeout_s
        self._watched: deque[_Watched] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, event: Event) -> None:
        """Expects the event within the timeout from now on."""
        self._watched.append(_Watched(event, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def is_overdue(self) -> bool:
        """Forgets events that came true, and says whether one is late."""
        while self._watched and self._watched[0].event.query():
            self._watched.popleft()
        return bool(self._watched) and time.monotonic() > self._watched[0].since + self._timeout_s

    def _run(self) -> None:
        while not self.is_overdue():
            time.sleep(POLL_S)
        message = (
            f"{self._name} has waited for {self._timeout_s:.0f} s: another rank of the group has "
            "stopped or is late; this process ends, as its GPU cannot go on\n"
        )
        sys.stderr.write(message)
        sys.stderr.flush()
        os.abort()
