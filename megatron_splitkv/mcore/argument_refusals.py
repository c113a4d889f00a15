"""Megatron arguments that Split-KV refuses by name: what was given, why not, and the way out."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron_splitkv.errors import UnsupportedError

OTHER_IMPL = "or run with --context-parallel-impl megatron"


def refuse_unsupported_args(args: Namespace) -> None:
    """Raises for the first parsed argument that Split-KV would not honour.

    Raises:
        UnsupportedError: names the argument, its value, the reason and the way out.
    """
    for refusal in REFUSALS:
        value = getattr(args, refusal.name, None)
        if refusal.applies(value):
            raise UnsupportedError(
                f"{refusal.flag}={getattr(value, 'name', value)} does not work with "
                f"--context-parallel-impl splitkv: {refusal.reason}; {refusal.way_out}, "
                f"{OTHER_IMPL}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One Megatron argument, when it is refused, and what the message says."""

    name: str
    flag: str
    reason: str
    way_out: str = "leave it out"
    applies: Callable[[object], bool] = bool


def _attention_is_local(backend: object) -> bool:
    return getattr(backend, "name", backend) == "local"


def _is_other_than(word: str) -> Callable[[object], bool]:
    return lambda value: value is not None and value != word


_ZIG_ZAG = "its layers assume Megatron's own order of tokens"
_OWN_SPECS = "its layer specs name their attention themselves"
_GRAPHS = "its exchange is planned anew for each microbatch"
_LOGITS = "maximum logits are not kept across ranks"
_ORDER = "teacher values are stored in Megatron's own order of tokens"

REFUSALS = (
    Refusal(
        name="attention_dropout",
        flag="--attention-dropout",
        reason="ranks that hold parts of one row would drop different weights",
        way_out="set --attention-dropout 0",
    ),
    Refusal(
        name="hybrid_context_parallel",
        flag="--hybrid-context-parallel",
        reason="its groups change with each microbatch",
        way_out="leave it out: documents are balanced without it",
    ),
    Refusal(
        name="hierarchical_context_parallel_sizes",
        flag="--hierarchical-context-parallel-sizes",
        reason="there is one flat group",
    ),
    Refusal(
        name="hybrid_layer_pattern",
        flag="--hybrid-layer-pattern",
        reason=_ZIG_ZAG,
        way_out="use attention layers only",
    ),
    Refusal(
        name="hybrid_override_pattern",
        flag="--hybrid-override-pattern",
        reason=_ZIG_ZAG,
        way_out="use attention layers only",
    ),
    Refusal(
        name="is_hybrid_model",
        flag="--is-hybrid-model",
        reason=_ZIG_ZAG,
        way_out="use attention layers only",
    ),
    Refusal(
        name="experimental_attention_variant",
        flag="--experimental-attention-variant",
        reason=_ZIG_ZAG,
        way_out="use softmax attention",
    ),
    Refusal(
        name="heterogeneous_layers_config_path",
        flag="--heterogeneous-layers-config-path",
        reason=_OWN_SPECS,
        way_out="use layers of one kind",
    ),
    Refusal(
        name="heterogeneous_layers_config_encoded_json",
        flag="--heterogeneous-layers-config-encoded-json",
        reason=_OWN_SPECS,
        way_out="use layers of one kind",
    ),
    Refusal(
        name="reset_attention_mask",
        flag="--reset-attention-mask",
        reason="a dense mask is not read, document bounds are",
        way_out="use --dataloader-inter-document-masking",
    ),
    Refusal(
        name="attention_backend",
        flag="--attention-backend",
        reason="Megatron would put its own attention in place of ours",
        applies=_attention_is_local,
    ),
    Refusal(
        name="transformer_impl",
        flag="--transformer-impl",
        reason="its layers bypass the replaced attention",
        way_out="use local or transformer_engine",
        applies=lambda value: value == "inference_optimized",
    ),
    Refusal(
        name="use_kitchen_attention",
        flag="--use-kitchen-attention",
        reason="it is another attention",
    ),
    Refusal(
        name="qk_clip",
        flag="--qk-clip",
        reason=_LOGITS,
    ),
    Refusal(
        name="log_max_attention_logit",
        flag="--log-max-attention-logit",
        reason=_LOGITS,
    ),
    Refusal(
        name="position_embedding_type",
        flag="--position-embedding-type",
        reason="a bias on the logits (relative positions, alibi) is not added",
        way_out="use rope, yarn or learned_absolute",
        applies=lambda value: value == "relative",
    ),
    Refusal(
        name="cuda_graph_impl",
        flag="--cuda-graph-impl",
        reason=_GRAPHS,
        applies=_is_other_than("none"),
    ),
    Refusal(
        name="enable_cuda_graph",
        flag="--enable-cuda-graph",
        reason=_GRAPHS,
    ),
    Refusal(
        name="external_cuda_graph",
        flag="--external-cuda-graph",
        reason=_GRAPHS,
    ),
    Refusal(
        name="logits_load_dir",
        flag="--logits-load-dir",
        reason=_ORDER,
    ),
    Refusal(
        name="logits_save_dir",
        flag="--logits-save-dir",
        reason=_ORDER,
    ),
    Refusal(
        name="perform_rl_step",
        flag="--perform-rl-step",
        reason="its batches do not pass through the replaced functions",
    ),
)
