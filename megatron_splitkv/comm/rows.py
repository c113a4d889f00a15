"""Moving rows between ranks: query rows out, partials back. The only user of torch.distributed.

A row on the wire is a packed byte string (`RowFormat`), so each direction of a stage is one
collective whatever tensors travel in it. A collective returns a `Pending`; nothing is read before
`Pending.wait()`. Every rank runs the same collectives in the same order, also with zero rows.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_splitkv.config import WIRE_ALIGNMENT_BYTES
from megatron_splitkv.layout import ExchangeStage

Counts = Sequence[int]


class Pending:
    """A collective in flight."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """Blocks the current stream (CPU: the caller) until the rows are there and returns them."""
        return self._finish()


class Transport(Protocol):
    """Moves packed rows among the ranks of one context-parallel group."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupTransport:
    """The transport of a `torch.distributed` process group (NCCL or gloo).

    Attributes:
        group: the context-parallel group.
    """

    group: ProcessGroup

    @property
    def rank(self) -> int:
        """Rank inside the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def exchange(self, rows: Tensor, send_counts: Counts, recv_counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        received = rows.new_empty(sum(recv_counts), rows.shape[1])
        work = dist.all_to_all_single(
            received, rows, list(recv_counts), list(send_counts), group=self.group, async_op=True
        )
        return _pending(received, work)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        gathered = rows.new_empty(self.size * len(rows), rows.shape[1])
        work = dist.all_gather_into_tensor(gathered, rows, group=self.group, async_op=True)
        return _pending(gathered.view(self.size, *rows.shape), work)


def _pending(tensor: Tensor, work: dist.Work | None) -> Pending:
    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return tensor

    return Pending(finish)


class ThreadGroup:
    """Ranks of one process, a thread each: the real schedule without processes or a network."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._mail: list[list[Tensor]] = [[] for _ in range(size)]

    def swap(self, rank: int, outgoing: list[Tensor]) -> list[Tensor]:
        """Gives `outgoing[r]` to each rank r; returns what the others gave to `rank`."""
        self._mail[rank] = outgoing
        self._barrier.wait()
        incoming = [mail[rank] for mail in self._mail]
        self._barrier.wait()
        return incoming

    def run[T](self, body: Callable[["ThreadTransport"], T]) -> list[T]:
        """Runs `body` once for each rank, all at once; returns their results in rank order.

        Raises:
            Exception: the first error of any rank; the others are released by the barrier.
        """
        results: list[T | None] = [None] * self.size
        errors: list[Exception] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = body(ThreadTransport(group=self, rank=rank))
            except Exception as error:
                if not isinstance(error, threading.BrokenBarrierError) or not errors:
                    errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next(
                (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
            )
        return results  # type: ignore[return-value]


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

    def exchange(self, rows: Tensor, send_counts: Counts, recv_counts: Counts) -> Pending:
        """See `Transport.exchange`."""
        incoming = self.group.swap(self.rank, list(rows.split(list(send_counts))))
        assert [len(part) for part in incoming] == list(recv_counts), "exchange tables disagree"
        received = torch.cat(incoming)
        return Pending(lambda: received)

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`."""
        gathered = torch.stack(self.group.swap(self.rank, [rows] * self.size))
        return Pending(lambda: gathered)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the fields of one row lie in its bytes.

    Attributes:
        fields: shape of one row and dtype of each field, in wire order.
    """

    fields: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, each field padded to 16 bytes."""
        return sum(self._field_bytes)

    @property
    def _field_bytes(self) -> list[int]:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in self.fields]
        return [-(-size // WIRE_ALIGNMENT_BYTES) * WIRE_ALIGNMENT_BYTES for size in sizes]

    def pack(self, tensors: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """Copies rows of the tensors side by side, `[num_rows, row_bytes]` uint8.

        Args:
            tensors: one for each field, `[T, *shape]`; cast to the field's dtype.
            rows: int64 indices of the rows to take; None takes all.
        """
        taken = [tensor if rows is None else tensor.index_select(0, rows) for tensor in tensors]
        packed = taken[0].new_zeros(len(taken[0]), self.row_bytes, dtype=torch.uint8)
        for field, tensor in zip(self.unpack(packed), taken, strict=True):
            field.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views the fields of packed rows, `[num_rows, *shape]` each; no copy."""
        views: list[Tensor] = []
        offset = 0
        for (shape, dtype), size in zip(self.fields, self._field_bytes, strict=True):
            field = packed[:, offset : offset + prod(shape) * dtype.itemsize].view(dtype)
            views.append(field.view(len(packed), *shape))
            offset += size
        return views


def gather_rows(
    packed_by: Callable[[Tensor | None], Tensor], stage: ExchangeStage, transport: Transport
) -> Pending:
    """Sends this rank's query rows to the ranks of a stage and receives theirs.

    Args:
        packed_by: packs the given local rows (None: all of them).
        stage: the exchange table.
        transport: the group.
    Returns:
        Pending `[R, row_bytes]` rows of the other ranks, grouped by source in rank order.
    """
    if not stage.is_all_gather:
        rows = packed_by(stage.send_rows)
        return transport.exchange(rows, stage.send_counts, stage.recv_counts)
    pending = transport.all_gather(packed_by(None))

    def others() -> Tensor:
        gathered = pending.wait()
        ahead, behind = gathered[: transport.rank], gathered[transport.rank + 1 :]
        return torch.cat([ahead.flatten(0, 1), behind.flatten(0, 1)])

    return Pending(others)


def return_rows(packed: Tensor, stage: ExchangeStage, transport: Transport) -> Pending:
    """Sends what was made of received rows back to the ranks that own them.

    Args:
        packed: `[R, row_bytes]` uint8, one for each received row, in their order.
        stage: the exchange table that `gather_rows` used.
        transport: the group.
    Returns:
        Pending `[S, row_bytes]`, one for each row this rank sent, in the order it sent them.
    """
    return transport.exchange(packed, stage.recv_counts, stage.send_counts)


def all_gather_rows(tensor: Tensor, counts: Counts, transport: Transport) -> list[Tensor]:
    """Gives every rank the rows of all ranks.

    Args:
        tensor: this rank's rows, `[counts[rank], ...]`.
        counts: rows of each rank, `[size]`.
        transport: the group.
    Returns:
        The rows of each rank, in rank order.
    """
    row_format = RowFormat(((tensor.shape[1:], tensor.dtype),))
    packed = row_format.pack([tensor])
    sent = packed.repeat(transport.size, 1)
    received = transport.exchange(sent, [len(tensor)] * transport.size, counts).wait()
    (rows,) = row_format.unpack(received)
    return list(rows.split(list(counts)))


def check_same_plan(fingerprint: str, transport: Transport, device: torch.device) -> None:
    """Compares plan fingerprints over the group.

    Raises:
        ValueError: on every rank alike, when the ranks were fed different documents.
    """
    value = torch.tensor([int(fingerprint, 16) - 2**63], dtype=torch.int64, device=device)
    everyone = transport.all_gather(value.view(torch.uint8)[None]).wait()
    prints = [f"{number + 2**63:016x}" for number in everyone.view(torch.int64).flatten().tolist()]
    if len(set(prints)) > 1:
        ranks = ", ".join(f"rank {rank}: {print_}" for rank, print_ in enumerate(prints))
        raise ValueError(
            "the ranks of a context-parallel group hold different plans "
            f"({ranks}); they must be fed the same documents: check that the data loader gives "
            "all context-parallel ranks of a data-parallel rank the same samples"
        )
