"""Rotary positions under a plan: each local token gets the angle of its position.

A wrong slice moves a toy loss in its sixth digit, so tests compare gradients and rotated tensors
by position.
"""

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megatron_splitkv.comm import ProcessGroup
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Plan


def get_pos_emb_on_this_cp_rank(
    book: PlanBook, pos_emb: Tensor, seq_dim: int, cp_group: ProcessGroup
) -> Tensor:
    """Stands in for Megatron's function of that name, for sequences that are one document.

    Args:
        book: the model's plans.
        pos_emb: angles of the whole sequence along `seq_dim`.
        seq_dim: dimension of the tokens.
        cp_group: the context-parallel group.
    Returns:
        The angles of this rank's tokens, in plan order.
    """
    plan = book.unpacked(pos_emb.shape[seq_dim], 1, cp_group, pos_emb.device)
    layout = book.context(plan, cp_group, pos_emb.device, plan.queries).layout
    return pos_emb.index_select(seq_dim, layout.kv_index)


def apply_rotary_pos_emb_thd(  # noqa: PLR0913 (the parameters are those of Megatron)
    book: PlanBook,
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Stands in for Megatron's `_apply_rotary_pos_emb_thd`, for packed documents.

    Args:
        book: the model's plans.
        t: `[t, heads, dim]`, this rank's tokens in plan order.
        cu_seqlens: int32 document ends of the whole pack.
        freqs: angles `[max_seqlen, 1, 1, dim]` by position in the document, or
            `[T, 1, 1, dim]` of the whole pack.
        rotary_interleaved, mla_rotary_interleaved, mscale, multi_latent_attention: as in Megatron.
        cp_group: the context-parallel group.
    Returns:
        `t` rotated, same shape and dtype.
    Raises:
        ValueError: no `cp_group`.
    """
    if cp_group is None:
        raise ValueError("cp_group=None: rotary embedding of packed documents needs the group")
    plan = book.packed(cu_seqlens, cp_group)
    positions = _freq_rows(plan, book, freqs, cp_group, t.device)
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, positions),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
        multi_latent_attention=multi_latent_attention,
    ).squeeze(1)


def _freq_rows(
    plan: Plan, book: PlanBook, freqs: Tensor, cp_group: ProcessGroup, device: torch.device
) -> Tensor:
    layout = book.context(plan, cp_group, device, plan.queries).layout
    return layout.kv_index if len(freqs) == plan.num_tokens else layout.positions


def wrap_rotary(model: torch.nn.Module, book: PlanBook) -> None:
    """Makes the rotary embeddings of one model follow its plans, without replacing any function.

    For models built by hand with sequences that are not packed; packed documents are refused here
    and need `mcore.library.follow_plans`.

    Args:
        model: searched for modules with Megatron's rotary interface.
        book: the model's plans.
    Raises:
        ValueError: the model has no rotary embedding.
    """
    found = [
        module
        for module in model.modules()
        if hasattr(module, "get_rotary_seq_len") and hasattr(module, "cp_group")
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no rotary embedding to wrap; models with learned or no "
            "positions need no wrapping"
        )
    for module in found:
        _wrap_one(module, book)


def _wrap_one(module: torch.nn.Module, book: PlanBook) -> None:
    cp_group, whole_forward = module.cp_group, module.forward
    module.cp_group = None  # Megatron slices by zig-zag where it has a group

    def forward(*args: object, **kwargs: object) -> object:
        kwargs.pop("cp_group", None)
        result = whole_forward(*args, **kwargs)
        if cp_group is None or cp_group.size() == 1:
            return result
        if kwargs.get("packed_seq"):
            raise UnsupportedError(
                "packed_seq_params with wrap_rotary: Megatron would rotate packed documents in its "
                "own zig-zag order; use the launcher, or mcore.library.follow_plans instead"
            )
        if isinstance(result, tuple):  # yarn: angles and a scale
            return get_pos_emb_on_this_cp_rank(book, result[0], 0, cp_group), *result[1:]
        return get_pos_emb_on_this_cp_rank(book, result, 0, cp_group)

    module.forward = forward
