"""Ends a process whose GPU waits for a rank that is gone, as NCCL does for its collectives."""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

POLL_S = 1.0
STDERR = 2  # Python's own stream may be closed, replaced, or locked by a thread that waits


class _Watched(NamedTuple):
    number: int
    since: float


class Watchdog:
    """Watches collectives that finish in the order of their numbers.

    It asks CUDA nothing and holds nothing of it: while another thread copies to the host behind
    work of a GPU that cannot go on, even to drop an event that came true waits for that copy.
    """

    def __init__(self, name: str, timeout_s: float, has_finished: Callable[[int], bool]) -> None:
        """Watches nothing yet.

        Args:
            name: of what is watched, for the message.
            timeout_s: a collective that takes longer ends the process.
            has_finished: whether the collective of this number has.
        """
        self._name, self._timeout_s, self._has_finished = name, timeout_s, has_finished
        self._watched: deque[_Watched] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, number: int) -> None:
        """Expects this collective to finish within the timeout from now on."""
        self._watched.append(_Watched(number, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def overdue(self) -> int | None:
        """Forgets what has finished, and gives the number of a collective that is late."""
        while self._watched and self._has_finished(self._watched[0].number):
            self._watched.popleft()
        if self._watched and time.monotonic() > self._watched[0].since + self._timeout_s:
            return self._watched[0].number
        return None

    def _run(self) -> None:
        while (number := self.overdue()) is None:
            time.sleep(POLL_S)
        message = (
            f"{self._name}: collective {number} has not finished for {self._timeout_s:g} s: "
            "another rank of the group has stopped or is late; this process ends, as its GPU "
            "cannot go on. If that rank is only slow, give a longer --distributed-timeout-minutes\n"
        )
        try:
            os.write(STDERR, message.encode())
            faulthandler.dump_traceback(STDERR)
        finally:
            os.abort()
