"""Half the bytes of a partial at fp32's error: fp16 beside one fp32 scale for each (row, head)."""

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.cuda import cuda_launch
from megatron_splitkv.ops.native import (
    OP_NAMESPACE,
    as_rows,
    check_no_grad,
    check_tensor,
    cpu_launch,
    refusal,
)

_ENCODE = f"{OP_NAMESPACE}::encode_partials_"

torch.library.define(_ENCODE, "(Tensor(a!) encoded, Tensor(b!) scale, Tensor values) -> ()")


def encode_partials_(encoded: Tensor, scale: Tensor, values: Tensor) -> None:
    """Writes values as fp16 times a scale, the largest magnitude of each (row, head).

    An element is off by at most 2^-11 of itself, and below 2^-14 of its row's largest by 2^-25 of
    that. A (row, head) of zeros has scale 0; one that holds NaN or infinity decodes to no finite
    number. CPU and CUDA give the same bits. Targets may be views of packed rows.

    Args:
        encoded: `[R, H, D]`, fp16, overwritten.
        scale: `[R, H]`, fp32, overwritten; `merge_partials_` and `add_partials_` take both.
        values: `[R, H, D]`, fp32.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, or values requires a gradient.
        UnsupportedError: there is no kernel for the device of values.
    """
    fp32, device = (torch.float32,), values.device
    check_tensor("values", values, shape=(-1, -1, -1), dtypes=fp32, device=device)
    check_tensor("encoded", encoded, shape=values.shape, dtypes=(torch.float16,), device=device)
    check_tensor("scale", scale, shape=values.shape[:2], dtypes=fp32, device=device)
    check_no_grad("encode_partials_", values=values)
    torch.ops.megatron_splitkv.encode_partials_.default(encoded, scale, values)


def _encode_fake(encoded: Tensor, scale: Tensor, values: Tensor) -> None:
    return None


torch.library.register_fake(_ENCODE, _encode_fake)


@torch.library.impl(_ENCODE, "default")
def _encode_refused(encoded: Tensor, *_args: object) -> None:
    raise refusal("encode_partials_", encoded)


@torch.library.impl(_ENCODE, "cpu")
def _encode_cpu(encoded: Tensor, scale: Tensor, values: Tensor) -> None:
    _kernels.encode(
        values=as_rows(values),
        encoded=as_rows(encoded),
        scale=as_rows(scale),
        launch=cpu_launch(None),
    )


@torch.library.impl(_ENCODE, "cuda")
def _encode_cuda(encoded: Tensor, scale: Tensor, values: Tensor) -> None:
    _kernels.cuda_encode(
        values=as_rows(values),
        encoded=as_rows(encoded),
        scale=as_rows(scale),
        launch=cuda_launch(values.device, None),
    )
