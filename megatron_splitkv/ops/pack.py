"""Rows of several tensors side by side, as bytes that travel together."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.native import (
    as_address,
    check_no_grad,
    check_tensor,
    launch_on,
    no_outputs,
    register_op,
)


def pack_rows_(
    packed: Tensor,
    sources: Sequence[Tensor],
    begins: Sequence[int],
    rows: Tensor | None = None,
) -> None:
    """Writes chosen rows of the sources beside each other, in one pass over memory.

    The bytes of row `rows[i]` of each source begin at its byte of `packed[i]`; what lies between
    them is cleared.

    Args:
        packed: `[R, row_bytes]`, uint8, contiguous, overwritten; on CUDA its address and row_bytes
            are multiples of 16.
        sources: at most 8 tensors `[T, *shape]` of any dtype, whose rows are contiguous.
        begins: first byte of each source in a packed row; they ascend, and no two overlap.
        rows: `[R]`, int64, in `[0, T)` (checked on the CPU alone); None takes all rows, R = T.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, fields overlap, or a source
            requires a gradient.
        UnsupportedError: there is no kernel for the device of packed.
    """
    device = packed.device
    check_tensor("packed", packed, shape=(-1, -1), dtypes=(torch.uint8,), device=device)
    if not packed.is_contiguous():
        raise ValueError("packed is not contiguous, needs rows one behind the other")
    num_source_rows = len(sources[0]) if sources else 0
    num_rows = packed.shape[0]
    if rows is not None:
        check_tensor("rows", rows, shape=(num_rows,), dtypes=(torch.int64,), device=device)
    elif num_rows != num_source_rows:
        raise ValueError(
            f"packed has {num_rows} rows, needs the {num_source_rows} of its sources, or rows to "
            "choose"
        )
    if len(begins) != len(sources):
        raise ValueError(f"begins has {len(begins)} numbers for {len(sources)} sources")
    for i, source in enumerate(sources):
        if source.device != device or source.shape[0] != num_source_rows:
            raise ValueError(
                f"source {i} has {source.shape[0]} rows on {source.device}, needs "
                f"{num_source_rows} on {device}, as the others"
            )
        if not has_dense_rows(source):
            raise ValueError(
                f"source {i} has strides {source.stride()}, needs contiguous rows; pass "
                ".contiguous()"
            )
        check_no_grad("pack_rows_", **{f"source {i}": source})
    torch.ops.megatron_splitkv.pack_rows_.default(packed, sources, begins, rows)


def has_dense_rows(tensor: Tensor) -> bool:
    """Whether the elements of each row lie one behind the other."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def run_pack(
    packed: Tensor, sources: Sequence[Tensor], begins: Sequence[int], rows: Tensor | None = None
) -> None:
    """`pack_rows_` without its checks, for callers that made the arguments themselves."""
    num_rows, row_bytes = packed.shape
    row_strides: list[int] = []
    ends: list[int] = []
    for source, begin in zip(sources, begins, strict=True):
        element_bytes = source.element_size()
        row_strides.append(source.stride(0) * element_bytes)
        ends.append(begin + prod(source.shape[1:]) * element_bytes)
    _kernels.pack(
        packed=packed.data_ptr(),
        num_rows=num_rows,
        row_bytes=row_bytes,
        index=as_address(rows),
        num_source_rows=len(sources[0]) if sources else 0,
        sources=[source.data_ptr() for source in sources],
        row_strides=row_strides,
        begins=begins,
        ends=ends,
        launch=launch_on(packed.device),
    )


register_op(
    "pack_rows_",
    "(Tensor(a!) packed, Tensor[] sources, int[] begins, Tensor? rows=None) -> ()",
    native=run_pack,
    fake=no_outputs,
)
