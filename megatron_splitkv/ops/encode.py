"""Half the bytes of a partial at fp32's error: fp16 beside one fp32 scale for each (row, head)."""

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.native import (
    Rows,
    as_address,
    check_no_grad,
    check_tensor,
    launch_on,
    no_outputs,
    register_op,
)


def encode_partials_(
    encoded: Tensor,
    scale: Tensor,
    values: Tensor,
    sent_lse: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Writes chosen rows as fp16 times a scale, the largest magnitude of each (row, head).

    An element is off by at most 2^-11 of itself, and below 2^-14 of its row's largest by 2^-25 of
    that. A (row, head) of zeros has scale 0; one that holds NaN or infinity decodes to no finite
    number. CPU and CUDA give the same bits. Targets may be views of packed rows.

    Args:
        encoded: `[R, H, D]`, fp16, overwritten.
        scale: `[R, H]`, fp32, overwritten; `merge_partials_` and `add_partials_` take both.
        values: `[T, H, D]`, fp32.
        sent_lse: `[R, H]`, fp32, overwritten by lse in the same pass; None where values have none.
        lse: `[T, H]`, fp32, given together with sent_lse.
        rows: `[R]`, int64, in `[0, T)` (checked on the CPU alone); None takes all rows, R = T.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, one of sent_lse and lse is missing,
            or values requires a gradient.
        UnsupportedError: there is no kernel for the device of values.
    """
    fp32, device = (torch.float32,), values.device
    check_tensor("values", values, shape=(-1, -1, -1), dtypes=fp32, device=device)
    num_rows = len(values)
    if rows is not None:
        num_rows = len(rows)
        check_tensor("rows", rows, shape=(num_rows,), dtypes=(torch.int64,), device=device)
    shape = (num_rows, *values.shape[1:])
    check_tensor("encoded", encoded, shape=shape, dtypes=(torch.float16,), device=device)
    check_tensor("scale", scale, shape=shape[:2], dtypes=fp32, device=device)
    if (sent_lse is None) != (lse is None):
        raise ValueError("sent_lse and lse go together; give both or none")
    if sent_lse is not None and lse is not None:
        check_tensor("sent_lse", sent_lse, shape=shape[:2], dtypes=fp32, device=device)
        check_tensor("lse", lse, shape=values.shape[:2], dtypes=fp32, device=device)
    check_no_grad("encode_partials_", values=values)
    torch.ops.megatron_splitkv.encode_partials_.default(encoded, scale, values, sent_lse, lse, rows)


def run_encode(
    encoded: Tensor | Rows,
    scale: Tensor | Rows,
    values: Tensor,
    sent_lse: Tensor | Rows | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """`encode_partials_` without its checks, for callers that made the arguments themselves."""
    if rows is not None and len(rows) == 0:
        return  # it has no address, and without one all rows would be taken
    _kernels.encode(
        values=values,
        index=as_address(rows),
        encoded=encoded,
        scale=scale,
        lse=lse,
        sent_lse=sent_lse,
        launch=launch_on(values.device),
    )


register_op(
    "encode_partials_",
    "(Tensor(a!) encoded, Tensor(b!) scale, Tensor values, Tensor(c!)? sent_lse=None, "
    "Tensor? lse=None, Tensor? rows=None) -> ()",
    native=run_encode,
    fake=no_outputs,
)
