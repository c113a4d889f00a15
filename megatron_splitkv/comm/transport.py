"""The small interface behind which rows move, whatever carries them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
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

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """Memory from which the rows of an exchange travel without another copy.

        The exchange must be the next collective, and may also be given rows from elsewhere if this
        was not called.

        Args:
            counts: of the exchange.
            row_bytes: of its rows.
            device: of its rows.
        Returns:
            `[counts[rank].sum(), row_bytes]` uint8, not initialised.
        """
        ...

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


@dataclass
class PassingTransport:
    """Passes everything on; the base of transports that watch or change another one.

    Attributes:
        inner: the transport that does the work.
    """

    inner: Transport

    @property
    def rank(self) -> int:
        """Rank inside the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.inner.size

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        return self.inner.send_buffer(counts, row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        return self.inner.exchange(rows, counts)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        return self.inner.all_gather(rows)


def empty_rows(num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """A send buffer of ordinary memory."""
    return torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=device)
