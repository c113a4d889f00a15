"""`delta`, the row sums that the backward needs besides the log-sum-exp."""

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.native import (
    INPUT_DTYPES,
    check_tensor,
    launch_on,
    register_op,
)


def attention_delta(dout: Tensor, out: Tensor) -> Tensor:
    """Row sums of `dout * out` in fp32.

    Args:
        dout: gradient of the merged output, `[T, H, Dv]`, fp32, bf16 or fp16.
        out: merged output, `[T, H, Dv]`, fp32, bf16 or fp16.
    Returns:
        delta `[T, H]`, fp32.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, or on CUDA one is bf16 and the
            other fp16.
        UnsupportedError: there is no kernel for the device of dout.
    """
    check_tensor("dout", dout, shape=(-1, -1, -1), dtypes=INPUT_DTYPES, device=dout.device)
    check_tensor("out", out, shape=dout.shape, dtypes=INPUT_DTYPES, device=dout.device)
    return torch.ops.megatron_splitkv.attention_delta.default(dout, out)


def _empty_delta(dout: Tensor, _out: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[:2], dtype=torch.float32)


def run_delta(dout: Tensor, out: Tensor) -> Tensor:
    """`attention_delta` without its checks, for callers that made the arguments themselves."""
    if not dout.is_cuda:
        return (dout.float() * out.float()).sum(dim=-1)
    delta = _empty_delta(dout, out)
    _kernels.cuda_row_dot(a=dout, b=out, sums=delta, launch=launch_on(dout.device))
    return delta


register_op(
    "attention_delta",
    "(Tensor dout, Tensor out) -> Tensor",
    native=run_delta,
    fake=_empty_delta,
)
