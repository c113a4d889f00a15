"""Naive twins of the ops: dense torch in fp32, any device, same signatures and contract.

They say what the kernels compute, for readers and for tests; no product path calls them, as they
take O(Tq * Hq * Tk) memory. They are not the oracle of the tests, which is fp64 and written apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    *,
    softmax_scale: float,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Twin of `megatron_splitkv.ops.partial_attention`, which documents it."""
    visible = _visible_pairs(kv_begin, kv_end, len(k))
    q = _clear_rows(q, ~visible.any(dim=1))
    k, v = (_per_query_head(_clear_rows(x, ~visible.any(dim=0)), q.shape[1]) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) * softmax_scale
    scores.masked_fill_(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1) if len(k) else scores.new_full(q.shape[:2], -torch.inf)
    probs = torch.exp(scores - _finite_shift(lse)[..., None])
    return torch.einsum("qhk,khd->qhd", probs, v).to(out_dtype), lse


def partial_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    softmax_scale: float,
    accumulate: bool = True,
) -> Tensor:
    """Twin of `megatron_splitkv.ops.partial_attention_backward`, which documents it."""
    num_heads_q, num_heads_kv = q.shape[1], k.shape[1]
    # [Tq, Hq, Tk]: a merged result may be empty for one head of a row and not for another.
    visible = _visible_pairs(kv_begin, kv_end, len(k))[:, None, :] & (lse > -torch.inf)[..., None]
    is_unused = ~visible.any(dim=2)
    q, dout = _clear_rows(q, is_unused), _clear_rows(dout, is_unused)
    is_unseen = ~visible.any(dim=0).any(dim=0)
    k, v = (_per_query_head(_clear_rows(x, is_unseen), num_heads_q) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k) * softmax_scale
    probs = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0.0)
    dprobs = torch.einsum("qhd,khd->qhk", dout, v)
    ds = (probs * (dprobs - delta[..., None]) * softmax_scale).masked_fill(~visible, 0.0)
    dk_heads = torch.einsum("qhk,qhd->khd", ds, q)
    dv_heads = torch.einsum("qhk,qhd->khd", probs, dout)
    for gradient, of_heads in ((dk, dk_heads), (dv, dv_heads)):
        added = of_heads.unflatten(1, (num_heads_kv, -1)).sum(dim=2)
        gradient.copy_(gradient + added if accumulate else added)
    return torch.einsum("qhk,khd->qhd", ds, k)


def merge_partials_(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """Twin of `megatron_splitkv.ops.merge_partials_`, which documents it."""
    ptr, slots = part_ptr.tolist(), part_slots.long()
    part_out = _scaled(part_out, part_scale)
    if not accumulate:
        out.zero_()
        lse.fill_(-torch.inf)
    for row in range(len(out)):
        mine = slots[ptr[row] : ptr[row + 1]]
        outs = torch.cat([out[row][None].float(), part_out[mine]])
        lses = torch.cat([lse[row][None], part_lse[mine]])
        top = _finite_shift(lses.amax(dim=0))
        weights = torch.exp(lses - top)
        total = weights.sum(dim=0)
        # Not weights * outs: an empty partial has weight 0 and may hold NaN.
        weighted = torch.where(weights[..., None] == 0, 0.0, weights[..., None] * outs)
        out[row] = weighted.sum(dim=0) / torch.where(total == 0, 1.0, total)[:, None]
        lse[row] = top + torch.log(total)


def add_partials_(
    total: Tensor,
    parts: Tensor,
    part_ptr: Tensor,
    part_slots: Tensor,
    part_scale: Tensor | None = None,
    *,
    accumulate: bool = True,
) -> None:
    """Twin of `megatron_splitkv.ops.add_partials_`, which documents it."""
    ptr, parts = part_ptr.tolist(), _scaled(parts, part_scale)
    for row in range(len(total)):
        slots = part_slots[ptr[row] : ptr[row + 1]].tolist()
        start = total[row] if accumulate else torch.zeros(total[row].shape, device=total.device)
        total[row] = sum((parts[slot] for slot in slots), start)


def encode_partials_(
    encoded: Tensor,
    scale: Tensor,
    values: Tensor,
    sent_lse: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Twin of `megatron_splitkv.ops.encode_partials_`, which documents it."""
    values = values if rows is None else values[rows]
    scale.copy_(values.abs().amax(dim=-1))
    encoded.copy_(values / torch.where(scale == 0, 1.0, scale)[..., None])
    if sent_lse is not None and lse is not None:
        sent_lse.copy_(lse if rows is None else lse[rows])


def pack_rows_(
    packed: Tensor,
    sources: Sequence[Tensor],
    begins: Sequence[int],
    rows: Tensor | None = None,
) -> None:
    """Twin of `megatron_splitkv.ops.pack_rows_`, which documents it."""
    packed.zero_()
    for source, begin in zip(sources, begins, strict=True):
        chosen = source if rows is None else source[rows]
        of_rows = chosen[:, None].contiguous().flatten(1).view(torch.uint8)
        packed[:, begin : begin + of_rows.shape[1]] = of_rows


def _scaled(parts: Tensor, scale: Tensor | None) -> Tensor:
    return parts.float() if scale is None else parts.float() * scale[..., None]


def _visible_pairs(kv_begin: Tensor, kv_end: Tensor, num_keys: int) -> Tensor:
    """Bool `[Tq, Tk]`: row i sees key j."""
    keys = torch.arange(num_keys, device=kv_begin.device)
    return (kv_begin[:, None] <= keys) & (keys < kv_end[:, None])


def _clear_rows(tensor: Tensor, mask: Tensor) -> Tensor:
    """fp32 copy with zeros where mask is set: those rows may hold NaN, and 0 * NaN is NaN."""
    mask = mask.reshape(*mask.shape, *([1] * (tensor.dim() - mask.dim())))
    return tensor.float().masked_fill(mask, 0.0)


def _per_query_head(tensor: Tensor, num_heads_q: int) -> Tensor:
    """`[T, Hkv, D]` to `[T, Hq, D]`: each KV head once for every query head that reads it."""
    return tensor.repeat_interleave(num_heads_q // tensor.shape[1], dim=1)


def _finite_shift(row_max: Tensor) -> Tensor:
    """0 in place of -inf, so that `-inf - shift` stays -inf."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)
