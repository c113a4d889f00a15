"""Joins partial attention results by their log-sum-exp."""

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


def merge_partials_(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """Merges into each row of a running result its partials over further, disjoint keys. In place.

    Row t merges the partials `part_slots[part_ptr[t]:part_ptr[t + 1]]` in that order, after the
    running result. A partial with lse = -inf is not read, its out may hold NaN; NaN in an lse makes
    the row NaN. A row whose only non-empty partial is one takes that partial bitwise; a row with
    none becomes (0, -inf).

    Args:
        out: running output, `[T, H, Dv]`, fp32, overwritten; without accumulate bf16 or fp16, too.
        lse: running log-sum-exp, `[T, H]`, fp32, natural log, -inf for an empty row, overwritten.
        part_out: outputs of the partials, `[R, H, Dv]`, fp32, bf16 or fp16.
        part_lse: log-sum-exps of the partials, `[R, H]`, fp32.
        part_ptr: where the slots of each row start, `[T + 1]`, int32, from 0 to the length of
            part_slots, never decreasing.
        part_slots: rows of part_out and part_lse, int32.
        part_scale: factor of each (row, head) of part_out, `[R, H]`, fp32; None takes 1.
        accumulate: False where there is no running result: out and lse may hold anything, every row
            is written.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, a slot is outside `[0, R)`, or an
            argument requires a gradient.
        UnsupportedError: there is no kernel for the device of out.
    Source: online softmax, Milakov and Gimelshein 2018.
    """
    fp32 = (torch.float32,)
    device = out.device
    out_dtypes = fp32 if accumulate else INPUT_DTYPES
    check_tensor("out", out, shape=(-1, -1, -1), dtypes=out_dtypes, device=device)
    num_rows, num_heads, head_dim_v = out.shape
    check_tensor("lse", lse, shape=(num_rows, num_heads), dtypes=fp32, device=device)
    part_shape = (-1, num_heads, head_dim_v)
    check_tensor("part_out", part_out, shape=part_shape, dtypes=INPUT_DTYPES, device=device)
    part_lse_shape = (len(part_out), num_heads)
    check_tensor("part_lse", part_lse, shape=part_lse_shape, dtypes=fp32, device=device)
    check_slots(part_ptr, part_slots, num_rows=num_rows, device=device)
    if part_scale is not None:
        check_tensor("part_scale", part_scale, shape=part_lse_shape, dtypes=fp32, device=device)
    check_no_grad("merge_partials_", out=out, lse=lse, part_out=part_out, part_lse=part_lse)
    torch.ops.megatron_splitkv.merge_partials_.default(
        out, lse, part_out, part_lse, part_ptr, part_slots, part_scale, accumulate=accumulate
    )


def run_merge(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor | Rows,
    part_lse: Tensor | Rows,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | Rows | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """`merge_partials_` without its checks, for callers that made the arguments themselves."""
    merged = written_by_kernel(out)
    _kernels.merge(
        out=merged,
        lse=lse,
        part_out=part_out,
        part_lse=part_lse,
        part_scale=part_scale,
        part_ptr=part_ptr.data_ptr(),
        part_slots=part_slots.data_ptr(),
        num_slots=len(part_slots),
        accumulates=accumulate,
        launch=launch_on(out.device),
    )
    if merged is not out:
        out.copy_(merged)


register_op(
    "merge_partials_",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse, Tensor part_ptr, "
    "Tensor part_slots, Tensor? part_scale=None, *, bool accumulate=True) -> ()",
    native=run_merge,
    fake=no_outputs,
)
