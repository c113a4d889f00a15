"""Sums partial gradients into the rows they belong to."""

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.native import (
    INPUT_DTYPES,
    Rows,
    check_no_grad,
    check_slots,
    check_tensor,
    launch_on,
    no_outputs,
    register_op,
    written_by_kernel,
)


def add_partials_(
    total: Tensor,
    parts: Tensor,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """Adds to each row its partials, in fp32 and in the order of their slots. In place.

    Row t takes the partials `part_slots[part_ptr[t]:part_ptr[t + 1]]`. Bitwise the same from run to
    run and for any number of threads.

    Args:
        total: `[T, H, D]`, fp32, added to; without accumulate bf16 or fp16, too.
        parts: `[R, H, D]`, fp32, bf16 or fp16.
        part_ptr: where the slots of each row start, `[T + 1]`, int32, from 0 to the length of
            part_slots, never decreasing.
        part_slots: rows of parts, int32.
        part_scale: factor of each (row, head) of parts, `[R, H]`, fp32; None takes 1.
        accumulate: False for sums that start from 0: total may hold anything, every row is written.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, a slot is outside `[0, R)` (found
            on the CPU alone), or an argument requires a gradient.
        UnsupportedError: there is no kernel for the device of total.
    """
    fp32, device = (torch.float32,), total.device
    total_dtypes = fp32 if accumulate else INPUT_DTYPES
    check_tensor("total", total, shape=(-1, -1, -1), dtypes=total_dtypes, device=device)
    num_rows, num_heads, dim = total.shape
    check_tensor("parts", parts, shape=(-1, num_heads, dim), dtypes=INPUT_DTYPES, device=device)
    check_slots(part_ptr, part_slots, num_rows=num_rows, device=device)
    if part_scale is not None:
        shape = (len(parts), num_heads)
        check_tensor("part_scale", part_scale, shape=shape, dtypes=fp32, device=device)
    check_no_grad("add_partials_", total=total, parts=parts)
    torch.ops.megatron_splitkv.add_partials_.default(
        total, parts, part_ptr, part_slots, part_scale, accumulate=accumulate
    )


def run_add(
    total: Tensor,
    parts: Tensor | Rows,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | Rows | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """`add_partials_` without its checks, for callers that made the arguments themselves."""
    summed = written_by_kernel(total)
    _kernels.add(
        total=summed,
        parts=parts,
        part_scale=part_scale,
        part_ptr=part_ptr.data_ptr(),
        part_slots=part_slots.data_ptr(),
        num_slots=len(part_slots),
        accumulates=accumulate,
        launch=launch_on(total.device),
    )
    if summed is not total:
        total.copy_(summed)


register_op(
    "add_partials_",
    "(Tensor(a!) total, Tensor parts, Tensor part_ptr, Tensor part_slots, "
    "Tensor? part_scale=None, *, bool accumulate=True) -> ()",
    native=run_add,
    fake=no_outputs,
)
