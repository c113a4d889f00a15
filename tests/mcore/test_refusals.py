"""What the module refuses by itself, told before anything runs on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.refusals import refuse_missing_kernels, refuse_unsupported_config
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


@pytest.mark.parametrize(
    ("setting", "impl"),
    [
        ({"cuda_graph_impl": "local"}, "local"),
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine"),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration"),
        ({"enable_cuda_graph": True}, "local"),
        ({"external_cuda_graph": True}, "transformer_engine"),
    ],
)
def test_cuda_graphs_are_refused_whatever_captures_them(setting, impl):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **setting
    )
    with pytest.raises(UnsupportedError, match=rf"^cuda_graph_impl={impl} .*; set it to none, or"):
        refuse_unsupported_config(config, None)
