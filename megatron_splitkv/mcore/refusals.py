"""What the attention module does not support, refused by name with the way out.

Checked when the module is built, so that it also holds for frameworks that make a
`TransformerConfig` without Megatron's command line.
"""

import torch
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import hooks
from megatron_splitkv.ops import cuda

_OTHER_IMPL = "or use --context-parallel-impl megatron"
_SUPPORTED_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.no_mask)


def refuse_unsupported_config(config: TransformerConfig, attention_dropout: float | None) -> None:
    """Raises for the first setting of a model that Split-KV would not honour.

    Raises:
        UnsupportedError: names the setting, what it is, and the way out.
    """
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    refused: tuple[tuple[str, object, bool, str], ...] = (
        ("attention_dropout", dropout, dropout > 0, "set it to 0.0"),
        ("qk_clip", config.qk_clip, config.qk_clip, "switch it off"),
        (
            "log_max_attention_logit",
            config.log_max_attention_logit,
            config.log_max_attention_logit,
            "switch it off",
        ),
        (
            "fp8_dot_product_attention",
            config.fp8_dot_product_attention,
            config.fp8_dot_product_attention or config.fp8_multi_head_attention,
            "keep attention in bf16",
        ),
        (
            "experimental_attention_variant",
            config.experimental_attention_variant,
            config.experimental_attention_variant is not None,
            "use softmax attention",
        ),
        (
            "cuda_graph_impl",
            config.cuda_graph_impl,
            config.cuda_graph_impl != "none",
            "set it to none",
        ),
        (
            "window_size",
            config.window_size,
            config.window_size is not None
            and (config.window_size[0] < 0 or config.window_size[1] != 0),
            "use a window of w >= 0 keys that ends at the row itself, (w, 0), or leave it out",
        ),
        (
            "mtp_num_layers",
            config.mtp_num_layers,
            bool(config.mtp_num_layers) and not _roll_follows_plans(),
            "its roll must follow the plan: use the launcher, or mcore.library.follow_plans",
        ),
    )
    for name, value, is_refused, way_out in refused:
        if is_refused:
            raise UnsupportedError(
                f"{name}={value} is not supported by split-kv attention; {way_out}, {_OTHER_IMPL}"
            )


def _roll_follows_plans() -> bool:
    """Whether the roll of multi-token prediction is ours; Megatron's own assumes zig-zag order."""
    return hooks.is_replaced(multi_token_prediction, "roll_tensor")


def refuse_unsupported_layer(
    attention_type: str, attn_mask_type: AttnMaskType, config: TransformerConfig
) -> None:
    """Raises for a layer that is not self-attention under a mask that has a spec.

    Raises:
        UnsupportedError: names what was asked for and the way out.
    """
    if attention_type != "self":
        raise UnsupportedError(
            f"attention_type={attention_type!r} is not supported by split-kv attention, which "
            f"replaces self-attention; keep the stock core attention in such layers, {_OTHER_IMPL}"
        )
    if attn_mask_type not in _SUPPORTED_MASKS:
        raise UnsupportedError(
            f"attn_mask_type={attn_mask_type} is not supported by split-kv attention; use "
            f"{', '.join(str(mask) for mask in _SUPPORTED_MASKS)}, {_OTHER_IMPL}"
        )
    if attn_mask_type == AttnMaskType.no_mask and config.window_size is not None:
        raise UnsupportedError(
            f"window_size={config.window_size} with attn_mask_type={attn_mask_type} is not "
            f"supported by split-kv attention, whose windows are causal; leave one out, "
            f"{_OTHER_IMPL}"
        )


def refuse_missing_kernels(config: TransformerConfig, dim_qk: int, dim_v: int) -> None:
    """Raises on a GPU for head dims or a dtype that no kernel there is for.

    Args:
        config: the model's configuration.
        dim_qk, dim_v: elements of a key head and of a value head.
    Raises:
        UnsupportedError: names the dims or the dtype, and what there is.
    """
    if not torch.cuda.is_available():
        return
    if (dim_qk, dim_v) not in cuda.HEAD_DIMS:
        dims = ", ".join(map(str, cuda.HEAD_DIMS))
        raise UnsupportedError(
            f"head dims ({dim_qk}, {dim_v}) of keys and values are not supported by split-kv "
            f"attention on a GPU, whose kernels are for {dims}; change --kv-channels, {_OTHER_IMPL}"
        )
    if config.params_dtype not in cuda.DTYPES:
        raise UnsupportedError(
            f"params_dtype={config.params_dtype} is not supported by split-kv attention on a GPU, "
            f"whose kernels are bf16 and fp16; add --bf16, {_OTHER_IMPL}"
        )


def refuse_other_mask(asked: AttnMaskType, built: AttnMaskType) -> None:
    """Raises where a call asks for another mask than the layer was built with.

    Raises:
        UnsupportedError: names both masks.
    """
    if (asked == AttnMaskType.no_mask) != (built == AttnMaskType.no_mask) or (
        asked not in _SUPPORTED_MASKS
    ):
        raise UnsupportedError(
            f"attn_mask_type={asked} in a call of a layer built with {built} is not supported by "
            f"split-kv attention; build the layer with the mask it is called with, {_OTHER_IMPL}"
        )


def refuse_unsupported_call(attention_mask: object, attention_bias: object) -> None:
    """Raises for a dense mask or bias, which the plan knows nothing of.

    Raises:
        UnsupportedError: names the argument and the way out.
    """
    if attention_mask is not None:
        raise UnsupportedError(
            "attention_mask holds a dense mask, which split-kv attention does not read; pass None "
            "(--no-create-attention-mask-in-dataloader) and give documents as cu_seqlens "
            f"(--dataloader-inter-document-masking), {_OTHER_IMPL}"
        )
    if attention_bias is not None:
        raise UnsupportedError(
            "attention_bias (alibi, relative positions) is not supported by split-kv attention; "
            f"use rope or learned positions, {_OTHER_IMPL}"
        )
