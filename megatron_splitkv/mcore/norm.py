"""LayerNorm and RMSNorm for layer specs without Transformer Engine or apex.

Megatron's own fallback refuses sequence parallelism, persistent kernels and zero-centered weights.
Sequence parallelism needs no other arithmetic: a norm acts on each token alone, and a rank's
tokens are a part of the sequence, so the gradient of the weight is a partial sum. The weight only
has to say so (`sequence_parallel`), and Megatron adds the sums up over the tensor-parallel ranks.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.hooks import Replacement


class TokenNorm(torch.nn.Module):
    """Normalizes the last dimension of each token, with a learned weight and, for LayerNorm, bias.

    State-dict keys are `weight` and `bias`, as everywhere in Megatron.
    """

    bias: Tensor | None

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Takes what Megatron passes to a norm.

        Args:
            config: `normalization` is LayerNorm or RMSNorm; `layernorm_zero_centered_gamma` stores
                the weight minus one; `sequence_parallel` marks the parameters.
            hidden_size: elements of the last dimension.
            eps: added to the variance.
        Raises:
            UnsupportedError: another normalization, or the memory-efficient form.
        """
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise UnsupportedError(
                f"normalization={config.normalization} is not supported without Transformer "
                "Engine; use LayerNorm or RMSNorm"
            )
        if config.memory_efficient_layer_norm:
            raise UnsupportedError(
                "memory_efficient_layer_norm=True needs apex; leave it out, or install apex"
            )
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _parameter(0.0 if self.zero_centered else 1.0, hidden_size, config)
        if config.normalization == "LayerNorm":
            self.bias = _parameter(0.0, hidden_size, config)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `x` `[..., hidden_size]`; same shape and dtype, statistics in fp32."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return functional.rms_norm(x, (self.hidden_size,), weight, self.eps)
        return functional.layer_norm(x, (self.hidden_size,), weight, self.bias, self.eps)


def _parameter(value: float, size: int, config: TransformerConfig) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    data = torch.full((size,), value, dtype=config.params_dtype, device=device)
    parameter = torch.nn.Parameter(data)
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


def norm_replacements() -> list[Replacement]:
    """Puts `TokenNorm` where Megatron would take its fallback; empty with apex or TE installed.

    The fallback is chosen in three places: the local spec provider, the block specs, and the final
    norm of a transformer block.
    """
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    replacements = []
    for module in (gpt_layer_specs, transformer_block):
        name = "LNImpl" if module is gpt_layer_specs else "LayerNormImpl"
        if getattr(module, name) is WrappedTorchNorm:
            replacements.append(_class_replacement(f"{module.__name__}:{name}"))
    if backends.LNImpl is WrappedTorchNorm:
        replacements.append(
            Replacement(
                target="megatron.core.models.backends:LocalSpecProvider.layer_norm",
                function=_layer_norm,
                signature=("self", "rms_norm", "for_qk", "has_residual"),
            )
        )
    return replacements


def _class_replacement(target: str) -> Replacement:
    return Replacement(target=target, function=TokenNorm, signature=None)


def _layer_norm(
    provider: object, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
) -> Callable[..., torch.nn.Module]:
    """Which norm the local backend uses; the kind follows the configuration."""
    return TokenNorm
