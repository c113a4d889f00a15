"""The norm of specs without Transformer Engine or apex."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import hooks
from megatron_splitkv.mcore.norm import TokenNorm, norm_replacements


def config(**changes):
    """The part of a TransformerConfig that a norm reads."""
    fields = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "memory_efficient_layer_norm": False,
        "sequence_parallel": False,
        "persist_layer_norm": True,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
    }
    return SimpleNamespace(**{**fields, **changes})


def dense(x, weight, bias, eps):
    """The formula in fp64."""
    x, weight = x.double(), weight.double()
    if bias is None:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight + bias.double()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_equals_the_formula_with_gradients(kind, zero_centered):
    torch.manual_seed(0)
    norm = TokenNorm(
        config(normalization=kind, layernorm_zero_centered_gamma=zero_centered), 24, eps=1e-3
    )
    assert torch.equal(norm.weight, torch.full((24,), 0.0 if zero_centered else 1.0))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(24))
    x = torch.randn(5, 3, 24, requires_grad=True)
    grad = torch.randn(5, 3, 24)
    y = norm(x)
    y.backward(grad)
    leaves = [x.detach().double(), norm.weight.detach().double()]
    leaves += [] if norm.bias is None else [norm.bias.detach().double()]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    weight = leaves[1] + 1 if zero_centered else leaves[1]
    expected = dense(leaves[0], weight, leaves[2] if len(leaves) > 2 else None, 1e-3)
    expected.backward(grad.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for got, want in zip([x, *norm.parameters()], leaves, strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_parameters_are_marked_and_named_as_stock(kind, is_sequence_parallel):
    norm = TokenNorm(config(normalization=kind, sequence_parallel=is_sequence_parallel), 8)
    stock = torch.nn.LayerNorm(8) if kind == "LayerNorm" else torch.nn.RMSNorm(8)
    assert list(norm.state_dict()) == list(stock.state_dict())
    assert all(p.sequence_parallel is is_sequence_parallel for p in norm.parameters())
    norm.load_state_dict(stock.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "L2Norm"}, "normalization=L2Norm .* use LayerNorm or RMSNorm"),
        ({"memory_efficient_layer_norm": True}, "memory_efficient_layer_norm=True needs apex"),
    ],
)
def test_refuses_by_name(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        TokenNorm(config(**changes), 8)


@pytest.mark.skipif(
    transformer_block.LayerNormImpl is not WrappedTorchNorm,
    reason="apex or Transformer Engine is installed: their norms are used",
)
def test_stands_where_megatron_would_fall_back():
    installed = hooks.install(norm_replacements())
    try:
        for normalization in ("LayerNorm", "RMSNorm"):
            layer = get_gpt_layer_local_spec(normalization=normalization, qk_layernorm=True)
            assert layer.submodules.input_layernorm is TokenNorm
            assert layer.submodules.self_attention.submodules.q_layernorm is TokenNorm
        assert transformer_block.LayerNormImpl is TokenNorm, "the final norm"
    finally:
        installed.uninstall()
    assert transformer_block.LayerNormImpl is WrappedTorchNorm
