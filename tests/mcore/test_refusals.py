"""What the module refuses on a GPU, told before anything runs there."""

from types import SimpleNamespace

import pytest
import torch

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.refusals import refuse_missing_kernels
from megatron_splitkv.ops import cuda

BF16 = SimpleNamespace(params_dtype=torch.bfloat16)
FP32 = SimpleNamespace(params_dtype=torch.float32)


def test_head_dims_and_dtypes_without_kernels_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dims in cuda.HEAD_DIMS:
        refuse_missing_kernels(BF16, *dims)
    with pytest.raises(
        UnsupportedError, match=r"head dims \(80, 80\) .* \(64, 64\), .*, \(256, 256\);"
    ):
        refuse_missing_kernels(BF16, 80, 80)
    with pytest.raises(UnsupportedError, match=r"params_dtype=torch.float32 .* add --bf16"):
        refuse_missing_kernels(FP32, 128, 128)


def test_the_cpu_takes_any(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse_missing_kernels(FP32, 12, 8)
