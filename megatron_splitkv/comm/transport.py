"""The small interface behind which rows move, whatever carries them."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

# Rows from each rank to each rank, `[size, size]` on the host; every rank holds the same numbers.
Counts = npt.NDArray[np.int64]


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

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """Sends `counts[rank, r]` consecutive rows to each rank r, in rank order.

        Args:
            rows: `[counts[rank].sum(), row_bytes]` uint8, contiguous.
            counts: rows from each rank to each rank, the same on all of them.
        Returns:
            Pending `[counts[:, rank].sum(), row_bytes]`, grouped by source in rank order.
        """
        ...

    def all_gather(self, rows: Tensor) -> Pending:
        """Sends all rows to every rank; pending `[size, num_rows, row_bytes]`."""
        ...
