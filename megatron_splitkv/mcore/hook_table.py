"""Which names of Megatron stand for context parallelism, and what stands there under Split-KV.

Four families: the core attention that layer specs name, the slicing of a batch, the slicing of
rotary embeddings, and the roll of multi-token prediction. Nothing else in Megatron depends on
which rank holds which token.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_splitkv.mcore import batch, mtp, rotary
from megatron_splitkv.mcore.arguments import is_packed
from megatron_splitkv.mcore.hooks import Replacement
from megatron_splitkv.mcore.module import SplitKVAttention
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.mcore.session import Session

_EMBEDDINGS = "megatron.core.models.common.embeddings"
_ROPE = f"{_EMBEDDINGS}.rope_utils"

LOCAL_ATTENTION = "megatron.core.models.backends:LocalSpecProvider.core_attention"
TE_ATTENTION = (
    "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention"
)
ATTENTION = f"{SplitKVAttention.__module__}:{SplitKVAttention.__name__}.forward"
BATCH = "megatron.core.utils:get_batch_on_this_cp_rank"
ROTARY_SLICE = f"{_ROPE}:get_pos_emb_on_this_cp_rank"
ROTARY_PACKED = f"{_ROPE}:_apply_rotary_pos_emb_thd"
MTP_ROLL = "megatron.core.transformer.multi_token_prediction:roll_tensor"


def splitkv_replacements(session: Session) -> list[Replacement]:
    """The table, with our functions bound to the plans of one run."""

    def attention(provider: object) -> type[SplitKVAttention]:
        return session.attention

    return [
        Replacement(target=LOCAL_ATTENTION, function=attention, signature=("self",)),
        Replacement(target=TE_ATTENTION, function=attention, signature=("self",)),
        *order_replacements(lambda: session.book),
    ]


def order_replacements(book: Callable[[], PlanBook]) -> list[Replacement]:
    """Whatever must agree on the order of tokens: batch, rotary positions and the MTP roll.

    Args:
        book: gives the model's plans; asked at each call.
    """
    return [
        Replacement(
            target=BATCH,
            function=_with_book(book, batch.get_batch_on_this_cp_rank),
            also=("megatron.training.training",),
            signature=(
                "batch",
                "is_hybrid_cp",
                "cp_group",
                "hybrid_cp_group_func",
                "use_per_sequence_balancing",
            ),
        ),
        Replacement(
            target=ROTARY_SLICE,
            function=_with_book(book, rotary.get_pos_emb_on_this_cp_rank),
            also=(
                f"{_EMBEDDINGS}.rotary_pos_embedding",
                f"{_EMBEDDINGS}.yarn_rotary_pos_embedding",
            ),
            signature=("pos_emb", "seq_dim", "cp_group"),
        ),
        Replacement(
            target=ROTARY_PACKED,
            function=_with_book(book, rotary.apply_rotary_pos_emb_thd),
            signature=(
                "t",
                "cu_seqlens",
                "freqs",
                "rotary_interleaved",
                "mla_rotary_interleaved",
                "mscale",
                "cp_group",
                "multi_latent_attention",
            ),
        ),
        Replacement(
            target=MTP_ROLL,
            function=_with_book(book, mtp.roll_tensor),
            signature=("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
        ),
    ]


def expected_calls(args: Namespace, model: Sequence[torch.nn.Module]) -> list[str]:
    """What this rank must have called once it has trained for a step.

    Args:
        args: validated arguments, and the process groups they describe exist.
        model: the model chunks of this rank.
    Returns:
        `ATTENTION` and targets of `splitkv_replacements`. That a spec asked for its attention is
        not enough: a layer must have run it. A stage in the middle of a pipeline gets no batch, a
        stage may hold no layer, and rotary embeddings are sliced only if there is something to
        slice.
    """
    from megatron.core import parallel_state

    stages = args.pipeline_model_parallel_size
    stage = parallel_state.get_pipeline_model_parallel_rank()
    has_layers = stages == 1 or any(
        isinstance(module, BaseTransformerLayer) for chunk in model for module in chunk.modules()
    )
    expected = [ATTENTION] if has_layers else []
    if stage in (0, stages - 1):
        expected.append(BATCH)
    if args.position_embedding_type in ("rope", "yarn", "mrope"):
        if is_packed(args):
            if has_layers and not args.no_rope_freq:
                expected.append(ROTARY_PACKED)
        elif args.context_parallel_size > 1:
            expected.append(ROTARY_SLICE)
    if args.mtp_num_layers and stage == stages - 1:
        expected.append(MTP_ROLL)
    return expected


def _with_book(
    book: Callable[[], PlanBook], function: Callable[..., object]
) -> Callable[..., object]:
    """`function` with the plan book as its first argument."""

    def call(*args: object, **kwargs: object) -> object:
        return function(book(), *args, **kwargs)

    return call
