"""`CountingTransport`: what a rank really hands to the network."""

from dataclasses import dataclass

from torch import Tensor

from megatron_splitkv.comm import Counts, Pending, Transport


@dataclass
class CountingTransport:
    """Passes everything on and counts the bytes of rows that leave this rank.

    Attributes:
        inner: the transport that does the work.
        bytes_sent: bytes handed over for other ranks since the start.
        num_calls: collectives since the start.
    """

    inner: Transport
    bytes_sent: int = 0
    num_calls: int = 0

    @property
    def rank(self) -> int:
        """Rank inside the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.inner.size

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        self.num_calls += 1
        sent = int(counts[self.rank].sum() - counts[self.rank, self.rank])
        self.bytes_sent += sent * rows.shape[1]
        return self.inner.exchange(rows, counts)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        self.num_calls += 1
        self.bytes_sent += (self.size - 1) * rows.numel()
        return self.inner.all_gather(rows)
