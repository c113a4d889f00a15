"""Query rows out, partials back: how rows are packed, and which of them move.

A row on the wire is a packed byte string (`RowFormat`), so each direction of a stage is one
collective whatever tensors travel in it. Nothing is read before `Pending.wait()`. Every rank runs
the same collectives in the same order, also with zero rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.comm.transport import Pending, Transport, empty_rows
from megatron_splitkv.config import WIRE_ALIGNMENT_BYTES
from megatron_splitkv.layout import ExchangeStage
from megatron_splitkv.ops.native import Rows, rows_at
from megatron_splitkv.ops.pack import has_dense_rows, run_pack


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
        return _inside(self).row_bytes

    def pack(
        self,
        tensors: Sequence[Tensor],
        rows: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Copies rows of the tensors side by side, `[num_rows, row_bytes]` uint8.

        Args:
            tensors: one for each field, `[T, *shape]`; cast to the field's dtype.
            rows: int64 indices of the rows to take; None takes all.
            into: memory for the packed rows; None takes new memory.
        """
        if into is None:
            into = empty_rows(
                len(tensors[0] if rows is None else rows), self.row_bytes, tensors[0].device
            )
        sources = [
            tensor.to(dtype) for tensor, (_, dtype) in zip(tensors, self.fields, strict=True)
        ]
        if not all(map(has_dense_rows, sources)):  # as in a view into a fused projection
            everything = slice(None) if rows is None else rows
            sources, rows = [source[everything].contiguous() for source in sources], None
        run_pack(into, sources, _inside(self).begins, rows)
        return into

    def cleared(self, packed: Tensor) -> Tensor:
        """Packed rows to be written through `unpack`; bytes between fields are zero."""
        for begin, end in _inside(self).gaps:
            packed[:, begin:end].zero_()
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Views the fields of packed rows, `[num_rows, *shape]` each; no copy."""
        num_rows, inside = packed.shape[0], _inside(self)
        of_dtype = {dtype: packed.view(dtype) for dtype in inside.dtypes}
        fields: list[Tensor] = []
        for (shape, dtype), begin, strides in zip(
            self.fields, inside.begins, inside.strides, strict=True
        ):
            whole = of_dtype[dtype]
            offset = whole.storage_offset() + begin // dtype.itemsize
            fields.append(whole.as_strided((num_rows, *shape), strides, offset))
        return fields

    def rows(self, packed: Tensor) -> list[Rows]:
        """What `unpack` gives, as kernels see it, for fields `[heads, dim]` and `[heads]`.

        It holds addresses alone: the caller keeps `packed` alive.
        """
        num_rows, address, inside = packed.shape[0], packed.data_ptr(), _inside(self)
        return [
            rows_at(address + begin, dtype, (num_rows, *shape), strides)
            for (shape, dtype), begin, strides in zip(
                self.fields, inside.begins, inside.strides, strict=True
            )
        ]


class _Inside(NamedTuple):
    """What follows from a format.

    Attributes:
        begins: first byte of each field in a row.
        strides: of each field's elements in packed rows.
        dtypes: of the fields, each once.
        row_bytes: of a row.
        gaps: first byte of each gap between fields, and one past its last.
    """

    begins: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    row_bytes: int
    gaps: tuple[tuple[int, int], ...]


@cache
def _inside(row_format: RowFormat) -> _Inside:
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in row_format.fields]
    padded = [-(-size // WIRE_ALIGNMENT_BYTES) * WIRE_ALIGNMENT_BYTES for size in sizes]
    *begins, row_bytes = accumulate(padded, initial=0)
    return _Inside(
        begins=tuple(begins),
        strides=tuple(_strides(shape, row_bytes // d.itemsize) for shape, d in row_format.fields),
        dtypes=tuple({dtype for _, dtype in row_format.fields}),
        row_bytes=row_bytes,
        gaps=tuple(
            (begin + size, begin + whole)
            for begin, size, whole in zip(begins, sizes, padded, strict=True)
            if size < whole
        ),
    )


def _strides(shape: tuple[int, ...], row_stride: int) -> tuple[int, ...]:
    """Of dense elements `shape` in rows that far apart."""
    return row_stride, *(prod(shape[dim:]) for dim in range(1, len(shape) + 1))


def chosen_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows of packed ones, `packed[rows]`, in new memory."""
    chosen = empty_rows(len(rows), packed.shape[1], packed.device)
    run_pack(chosen, [packed], (0,), rows)
    return chosen


def gather_rows(
    row_format: RowFormat, tensors: Sequence[Tensor], stage: ExchangeStage, transport: Transport
) -> Pending:
    """Sends this rank's query rows to the ranks of a stage and receives theirs.

    Args:
        row_format: of a row on the wire.
        tensors: its fields of all local rows.
        stage: the exchange table.
        transport: the group.
    Returns:
        Pending `[R, row_bytes]` rows of the other ranks, grouped by source in rank order.
    """
    if not stage.is_all_gather:
        buffer = transport.send_buffer(stage.counts, row_format.row_bytes, tensors[0].device)
        return transport.exchange(
            row_format.pack(tensors, stage.send_rows, into=buffer), stage.counts
        )
    pending = transport.all_gather(row_format.pack(tensors))

    def others() -> Tensor:
        # Closes the gap of the own rows from the end that is nearer.
        gathered, rank = pending.wait(), transport.rank
        if 2 * rank < transport.size:
            for slot in range(rank, 0, -1):
                gathered[slot].copy_(gathered[slot - 1])
            return gathered[1:].flatten(0, 1)
        for slot in range(rank, transport.size - 1):
            gathered[slot].copy_(gathered[slot + 1])
        return gathered[:-1].flatten(0, 1)

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
    return transport.exchange(packed, stage.counts.T)


def all_gather_rows(tensor: Tensor, counts: Sequence[int], transport: Transport) -> list[Tensor]:
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
    to_everyone = np.repeat(np.asarray(counts, dtype=np.int64)[:, None], transport.size, axis=1)
    received = transport.exchange(sent, to_everyone).wait()
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
