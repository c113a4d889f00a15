"""The small interface behind which rows move, whatever carries them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Counts = Sequence[int]


class Pending:
    """A collective in flight."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """Blocks the current stream (CPU: the caller) until the rows are there and returns them."""
        return self._finish()


class Transport(Protocol):
    """Moves packed rows among the ranks of one context-parallel group.

    A collective starts behind what the current stream holds and runs beside what comes after;
    received rows belong to the stream that started it, which must be the one that waits.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, rows: Tensor, send_counts: Counts, recv_counts: Counts) -> Pending:
        """Sends `send_counts[r]` consecutive rows to each rank r, in rank order.

        Args:
            rows: `[sum(send_counts), row_bytes]` uint8, contiguous.
            send_counts, recv_counts: rows to and from each rank, `[size]`.
        Returns:
            Pending `[sum(recv_counts), row_bytes]`, grouped by source in rank order.
        """
        ...

    def all_gather(self, rows: Tensor) -> Pending:
        """Sends all rows to every rank; pending `[size, num_rows, row_bytes]`."""
        ...
