"""Dense attention in fp64 with an explicit mask: what every check is held against.

It shares nothing with the kernels, the planner or the layout. Masks are written from the
definition of each query spec, document by document. Runs on the CPU, one head at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_splitkv.plan import Anchors, Causal, Full, Prefix, Queries, Suffix, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """fp64 results on the CPU.

    Attributes:
        out: `[Tq, Hq, Dv]`, 0 for rows that see no key.
        lse: `[Tq, Hq]`, natural log, -inf for rows that see no key.
        dq: `[Tq, Hq, D]`.
        dk: `[Tk, Hkv, D]`.
        dv: `[Tk, Hkv, Dv]`.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def document_mask(queries: Queries, doc_lens: Sequence[int]) -> Tensor:
    """Which query row of the stream sees which token of the pack, bool `[rows, tokens]`."""
    masks = [_one_document(queries, doc, length) for doc, length in enumerate(doc_lens)]
    return torch.block_diag(*masks).bool() if masks else torch.zeros(0, 0, dtype=torch.bool)


def _one_document(queries: Queries, doc: int, length: int) -> Tensor:
    rows, keys = torch.arange(length)[:, None], torch.arange(length)[None, :]
    match queries:
        case Causal():
            return keys <= rows
        case Window(size=size):
            return (keys <= rows) & (keys > rows - size)
        case Full():
            return torch.ones(length, length, dtype=torch.bool)
        case Prefix(lengths=lengths):
            return (keys <= rows) | (keys < lengths[doc])
        case Suffix(num_rows=num_rows):
            return (keys <= rows)[max(0, length - num_rows) :]
        case Anchors(positions=positions, rows_per_anchor=size):
            anchors = torch.tensor(positions[doc], dtype=torch.int64).repeat_interleave(size)
            return keys < anchors[:, None]


def own_block_mask(num_rows: int, rows_per_anchor: int) -> Tensor:
    """Which row sees which own-block key in context attention with anchors, bool `[rows, rows]`."""
    block = torch.arange(num_rows) // rows_per_anchor
    return block[:, None] == block[None, :]


def interval_mask(begin: Tensor, end: Tensor, num_keys: int) -> Tensor:
    """Bool `[Tq, Tk]`: row i sees keys `[begin[i], end[i])`."""
    keys = torch.arange(num_keys)
    return (begin.cpu()[:, None] <= keys) & (keys < end.cpu()[:, None])


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, *, softmax_scale: float
) -> Expected:
    """Forward and gradients of softmax attention.

    Args:
        q: `[Tq, Hq, D]`, any dtype and device, already rounded as the kernels get it.
        k: `[Tk, Hkv, D]`; query head h reads KV head `h // (Hq // Hkv)`.
        v: `[Tk, Hkv, Dv]`.
        dout: gradient of out, `[Tq, Hq, Dv]`.
        mask: bool `[Tq, Tk]`, True where the row sees the key.
        softmax_scale: factor of the logits.
    """
    q, k, v, dout = (tensor.detach().cpu().double() for tensor in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[:2], -torch.inf)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(q.shape[1]) if len(k) else ():
        kv_head = head // group
        weights, lse[:, head] = _softmax(q[:, head] @ k[:, kv_head].T * softmax_scale, mask)
        out[:, head] = weights @ v[:, kv_head]
        dscores = dout[:, head] @ v[:, kv_head].T
        delta = (dout[:, head] * out[:, head]).sum(1, keepdim=True)
        dscores = weights * (dscores - delta) * softmax_scale
        dq[:, head] = dscores @ k[:, kv_head]
        dk[:, kv_head] += dscores.T @ q[:, head]
        dv[:, kv_head] += weights.T @ dout[:, head]
    return Expected(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of each row; zeros and -inf where nothing is visible."""
    scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0), (top + torch.log(total))[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """How far a tensor is from what it should be; both infinite where NaN or infinities differ.

    Attributes:
        rel_l2: norm of the error over the norm of the expected tensor.
        worst_row: the largest row of the error over the larger of the expected row and the root
            mean square of all expected rows.
    """

    rel_l2: float
    worst_row: float


def error_of(got: Tensor, expected: Tensor) -> Error:
    """Compares positions of NaN and infinity, then values by last dimension.

    Args:
        got: any dtype and device.
        expected: the same shape; another one is an infinite error.
    """
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    wrong = Error(rel_l2=float("inf"), worst_row=float("inf"))
    if got.shape != expected.shape or bool(got.isnan().any()):
        return wrong
    if not torch.equal(got.isinf() * got.sign(), expected.isinf() * expected.sign()):
        return wrong
    if got.numel() == 0:
        return Error(rel_l2=0.0, worst_row=0.0)
    is_finite = expected.isfinite()
    difference = torch.where(is_finite, got - expected, 0.0)
    expected = torch.where(is_finite, expected, 0.0)
    rows = expected.norm(dim=-1)
    floor = float(rows.square().mean().sqrt()) or 1.0
    worst = float((difference.norm(dim=-1) / rows.clamp_min(floor)).max())
    return Error(rel_l2=float(difference.norm()) / (float(expected.norm()) or 1.0), worst_row=worst)


def lse_error(got: Tensor, expected: Tensor) -> float:
    """Largest `|error| / (1 + |lse|)`; infinite where -inf stands at other places."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if got.shape != expected.shape or not torch.equal(got == -torch.inf, expected == -torch.inf):
        return float("inf")
    is_finite = expected > -torch.inf
    error = (got - expected)[is_finite].abs() / (1.0 + expected[is_finite].abs())
    return float(error.max()) if error.numel() else 0.0
