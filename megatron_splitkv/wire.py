"""How partial results travel: fp32, bf16, or fp16 beside one scale for each row and head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_splitkv.comm import RowFormat, empty_rows
from megatron_splitkv.ops.encode import run_encode
from megatron_splitkv.ops.native import Rows

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Partials(NamedTuple):
    """Partial results of some rows, where they lie in packed rows; the caller keeps these alive.

    Attributes:
        values: outputs or query gradients, `[R, Hq, dim]`, in the wire dtype.
        lse: log-sum-exps, `[R, Hq]` fp32; None beside gradients.
        scale: factors of the values, `[R, Hq]` fp32; None where the wire dtype needs none.
    """

    values: Rows
    lse: Rows | None
    scale: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFormat:
    """The wire row of one kind of partial.

    Attributes:
        partial_dtype: "fp32", "bf16" or "fp16", as `SplitKVConfig.resolved_partial_dtype` says.
        num_heads: of the values of a row.
        dims: elements of a head, for each of the values that travel together.
        has_lse: whether the values are outputs, whose lse rides along.
    """

    partial_dtype: str
    num_heads: int
    dims: tuple[int, ...]
    has_lse: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        """What kernels should write the values in: the wire dtype, or fp32 where it is scaled."""
        return torch.float32 if self._is_scaled else _DTYPES[self.partial_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._rows.row_bytes

    def pack(
        self,
        values: Sequence[Tensor],
        lse: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Packed rows of partials.

        Args:
            values: for each of `dims` `[T, num_heads, dim]`, fp32, or in `compute_dtype`.
            lse: `[T, num_heads]` fp32 if the format has it.
            rows: `[R]` int64, which rows to take; None takes all, R = T.
            into: memory for the packed rows; None takes new memory.
        Returns:
            `[R, row_bytes]` uint8.
        """
        if into is None:
            num_rows = len(values[0] if rows is None else rows)
            into = empty_rows(num_rows, self.row_bytes, values[0].device)
        assert (lse is not None) == self.has_lse, "a format of outputs packs their lse"
        if not self._is_scaled:
            return self._rows.pack([*values] if lse is None else [*values, lse], rows, into)
        packed = self._rows.cleared(into)
        for part, mine in zip(self.unpack(packed), values, strict=True):
            assert part.scale is not None, "fp16 travels beside a scale"
            run_encode(part.values, part.scale, mine, part.lse, lse, rows)
        return packed

    def unpack(self, packed: Tensor) -> list[Partials]:
        """The values of packed rows; no copy."""
        fields, num_values = self._rows.rows(packed), len(self.dims)
        values, beside = fields[:num_values], fields[num_values:]
        lse = beside.pop(0) if self.has_lse else None
        scales = beside or [None] * num_values
        return [Partials(v, lse, scale) for v, scale in zip(values, scales, strict=True)]

    @property
    def _is_scaled(self) -> bool:
        return self.partial_dtype == "fp16"

    @property
    def _rows(self) -> RowFormat:
        return _row_format(self.partial_dtype, self.num_heads, self.dims, self.has_lse)


@cache
def _row_format(
    partial_dtype: str, num_heads: int, dims: tuple[int, ...], has_lse: bool
) -> RowFormat:
    per_head = ((num_heads,), torch.float32)
    num_scales = len(dims) if partial_dtype == "fp16" else 0
    values = [((num_heads, dim), _DTYPES[partial_dtype]) for dim in dims]
    return RowFormat((*values, *[per_head] * (int(has_lse) + num_scales)))
