"""Multi-token prediction under a plan: the next token of each local token, wherever it lives."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_splitkv.comm import ProcessGroup, Transport, all_gather_rows
from megatron_splitkv.layout import unshard_rows
from megatron_splitkv.mcore.module import layout_cu_seqlens
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Plan

# On a rolled loss mask: token counts of the mask before its first roll, on this rank and in all.
_COUNTS = "splitkv_token_counts"


def roll_tensor(
    book: PlanBook,
    tensor: Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Stands in for Megatron's `roll_tensor`: shifts left by one token inside each document.

    Args:
        book: the model's plans.
        tensor: `[b, s]` (packed `[1, t]`), this rank's tokens in plan order: ids, labels,
            positions (integers) or a loss mask (floating point). None gives (None, None).
        shifts: -1.
        dims: the last dimension.
        cp_group: the context-parallel group; None is a group of one.
        packed_seq_params: Megatron's, if documents are packed.
    Returns:
        The rolled tensor, zero at each document's last token, and its sum. For a loss mask under
        `mtp_normalization="global"` the sum is scaled so that Megatron's rank-local quotient of
        token counts becomes that of the whole group, as without context parallelism.
    Raises:
        ValueError: another shift or dimension.
    """
    if tensor is None:
        return None, None
    if shifts != -1 or dims not in (-1, tensor.dim() - 1):
        raise ValueError(f"shifts={shifts}, dims={dims}: split-kv rolls by -1 along the last dim")
    if cp_group is None:
        raise ValueError("cp_group=None: rolling under split-kv needs the context-parallel group")
    is_packed = packed_seq_params is not None
    plan = (
        book.packed(layout_cu_seqlens(packed_seq_params), cp_group)
        if is_packed
        else book.unpacked(tensor.shape[1] * cp_group.size(), len(tensor), cp_group, tensor.device)
    )
    layout = book.context(plan, cp_group, tensor.device, plan.queries).layout
    whole = _gather_tokens(tensor.flatten(), plan, book.transport(cp_group, tensor.device))
    shifted = _next_tokens(whole, plan)
    rolled = shifted[layout.kv_index].view_as(tensor)
    if not tensor.is_floating_point() or book.config.mtp_normalization == "megatron":
        return rolled, rolled.sum()
    local_before, global_before = getattr(tensor, _COUNTS, (tensor.sum(), whole.sum()))
    setattr(rolled, _COUNTS, (local_before, global_before))
    return rolled, local_before * shifted.sum() / global_before.clamp(min=1)


def _gather_tokens(tokens: Tensor, plan: Plan, transport: Transport | None) -> Tensor:
    """The values of all tokens in pack order, `[T]`."""
    if transport is None:
        return tokens
    return unshard_rows(all_gather_rows(tokens, plan.tokens, transport), plan)


def _next_tokens(whole: Tensor, plan: Plan) -> Tensor:
    """Value of the next token of the same document, zero at its last token, `[T]`."""
    rolled = torch.roll(whole, -1)
    ends = torch.tensor(plan.padded_lens, device=whole.device).cumsum(0) - 1
    has_tokens = torch.tensor([length > 0 for length in plan.padded_lens], device=whole.device)
    rolled[ends[has_tokens]] = 0
    return rolled
