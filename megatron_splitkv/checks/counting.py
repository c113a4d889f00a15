"""`CountingTransport`: what a rank really hands to the network."""

from dataclasses import dataclass

from torch import Tensor

from megatron_splitkv.comm import Counts, PassingTransport, Pending


@dataclass
class CountingTransport(PassingTransport):
    """Passes everything on and counts the bytes of rows that leave this rank.

    Attributes:
        bytes_sent: bytes handed over for other ranks since the start.
        num_calls: collectives since the start.
    """

    bytes_sent: int = 0
    num_calls: int = 0

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
