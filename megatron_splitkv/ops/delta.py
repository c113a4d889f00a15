"""`delta`, the row sums that the backward needs besides the log-sum-exp."""

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.cuda import cuda_launch
from megatron_splitkv.ops.native import INPUT_DTYPES, OP_NAMESPACE, as_rows, check_tensor, refusal

_DELTA = f"{OP_NAMESPACE}::attention_delta"

torch.library.define(_DELTA, "(Tensor dout, Tensor out) -> Tensor")


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


def _delta_fake(dout: Tensor, out: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[:2], dtype=torch.float32)


torch.library.register_fake(_DELTA, _delta_fake)


@torch.library.impl(_DELTA, "default")
def _delta_refused(dout: Tensor, *_args: object) -> Tensor:
    raise refusal("attention_delta", dout)


@torch.library.impl(_DELTA, "cpu")
def _delta_cpu(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.float() * out.float()).sum(dim=-1)


@torch.library.impl(_DELTA, "cuda")
def _delta_cuda(dout: Tensor, out: Tensor) -> Tensor:
    delta = dout.new_empty(dout.shape[:2], dtype=torch.float32)
    _kernels.cuda_row_dot(
        a=as_rows(dout),
        b=as_rows(out),
        sums=as_rows(delta),
        launch=cuda_launch(dout.device, None),
    )
    return delta
