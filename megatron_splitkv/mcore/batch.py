"""Megatron's batch, cut to the tokens of this context-parallel rank."""

from megatron.core import parallel_state
from torch import Tensor

from megatron_splitkv.comm import ProcessGroup
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.layout import shard_rows
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Plan

TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def shard_batch(
    batch: dict[str, Tensor | None], cp_group: ProcessGroup, book: PlanBook
) -> dict[str, Tensor | None]:
    """Takes this rank's tokens, labels, loss mask and positions, in plan order.

    Labels were shifted over the whole sequence before, so they simply follow their tokens.

    Args:
        batch: tensors `[b, s]` under "tokens", "labels", "loss_mask", "position_ids" (or None, or
            absent); "cu_seqlens" or "cu_seqlens_padded", int32, if documents are packed, then b
            is 1. Other entries stay as they are.
        cp_group: the context-parallel group.
        book: the model's plans.
    Returns:
        The batch with `[b, s / cp]` tensors.
    Raises:
        UnsupportedError: a dense attention mask.
        ValueError: the tokens do not fit cu_seqlens, or cannot be shared out equally.
    """
    if batch.get("attention_mask") is not None:
        raise UnsupportedError(
            "attention_mask in the batch is not read by split-kv attention; pass "
            "--no-create-attention-mask-in-dataloader, and give documents as cu_seqlens "
            "(--dataloader-inter-document-masking) where the mask separated them"
        )
    present = {key: batch[key] for key in TOKEN_KEYS if batch.get(key) is not None}
    if not present or cp_group.size() == 1:
        return batch
    plan = _plan_of(batch, present, cp_group, book)
    device = next(iter(present.values())).device
    context = book.context(plan, cp_group, device, plan.queries)
    index = context.layout.kv_index
    return batch | {key: shard_rows(tensor, index, dim=1) for key, tensor in present.items()}


def _plan_of(
    batch: dict[str, Tensor | None],
    present: dict[str, Tensor],
    cp_group: ProcessGroup,
    book: PlanBook,
) -> Plan:
    """The plan whose order one row of the batch has: all rows are cut alike."""
    padded = batch.get("cu_seqlens_padded")
    cu_seqlens = batch.get("cu_seqlens") if padded is None else padded
    tensor = next(iter(present.values()))
    if cu_seqlens is None:
        return book.unpacked(tensor.shape[1], 1, cp_group, tensor.device)
    plan = book.packed(cu_seqlens, cp_group)
    for key, tensor in present.items():
        if tuple(tensor.shape[:2]) != (1, plan.num_tokens):
            raise ValueError(
                f"{key} has shape {tuple(tensor.shape)}, but cu_seqlens ends at "
                f"{plan.num_tokens}; packed tensors must be [1, {plan.num_tokens}]"
            )
    return plan


def get_batch_on_this_cp_rank(
    book: PlanBook,
    batch: dict[str, Tensor | None],
    is_hybrid_cp: bool,
    cp_group: ProcessGroup | None = None,
    hybrid_cp_group_func: object = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Tensor | None]:
    """Stands in for `megatron.core.utils.get_batch_on_this_cp_rank`.

    `use_per_sequence_balancing` chooses between two zig-zag layouts there; documents decide here.

    Raises:
        UnsupportedError: hybrid context parallelism, whose groups change by microbatch.
    """
    if is_hybrid_cp:
        raise UnsupportedError(
            "hybrid_context_parallel=True is not supported by split-kv, whose plan spans a fixed "
            "group; leave out --hybrid-context-parallel, or use --context-parallel-impl megatron"
        )
    return shard_batch(batch, cp_group or parallel_state.get_context_parallel_group(), book)
