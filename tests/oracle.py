"""The oracle of every numerical test: dense attention in fp64 with an explicit mask.

Inputs are the tensors the kernel got, already rounded to their dtype. Rows that nothing sees are
taken as zero, since they may hold garbage. Gradients come from autograd in fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tolerances import LSE_ABS, Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """fp64 results of dense attention; gradients are zero when there was no dout.

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


def mask_from_intervals(kv_begin: Tensor, kv_end: Tensor, num_keys: int) -> Tensor:
    """Bool `[Tq, Tk]`: row i sees keys `[kv_begin[i], kv_end[i])`."""
    keys = torch.arange(num_keys)
    return (kv_begin.cpu()[:, None] <= keys) & (keys < kv_end.cpu()[:, None])


def mask_from_documents(
    doc_lens: Sequence[int], *, is_causal: bool = True, window: int | None = None
) -> Tensor:
    """Bool `[T, T]` over packed documents: a token sees its own document only.

    Args:
        doc_lens: tokens of each document, in stream order.
        is_causal: a token sees no later position.
        window: a token at position p sees positions `p - window + 1` and later.
    """
    lens = torch.tensor(list(doc_lens), dtype=torch.int64)
    document = torch.repeat_interleave(torch.arange(len(lens)), lens)
    position = torch.cat([torch.arange(length) for length in doc_lens] or [lens])
    mask = document[:, None] == document
    if is_causal:
        mask &= position[:, None] >= position
    if window is not None:
        mask &= position > position[:, None] - window
    return mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    dout: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Oracle:
    """Dense attention, one query head at a time, so memory is that of one `[Tq, Tk]` matrix.

    Args:
        q: `[Tq, Hq, D]`.
        k: `[Tk, Hkv, D]`; query head h reads KV head `h // (Hq // Hkv)`.
        v: `[Tk, Hkv, Dv]`.
        mask: bool `[Tq, Tk]`, True where the row sees the key.
        softmax_scale: factor of the logits.
        dout: gradient of out, `[Tq, Hq, Dv]`, or None for the forward alone.
        device: where to compute, and where the results are.
    """
    mask = mask.to(device)
    row_sees, key_seen = mask.any(dim=1), mask.any(dim=0)
    q, k, v = _clear(q, row_sees), _clear(k, key_seen), _clear(v, key_seen)
    num_rows, num_heads_q, _ = q.shape
    group = num_heads_q // k.shape[1]
    out = q.new_zeros(num_rows, num_heads_q, v.shape[2])
    lse = q.new_full((num_rows, num_heads_q), -torch.inf)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if dout is not None:
        dout = _clear(dout, row_sees)
    for head in range(num_heads_q) if len(k) > 0 else ():
        kv_head = head // group
        leaves = [x.detach().requires_grad_() for x in (q[:, head], k[:, kv_head], v[:, kv_head])]
        with torch.enable_grad():
            head_out, head_lse = _attend_head(*leaves, mask, softmax_scale)
        out[:, head], lse[:, head] = head_out.detach(), head_lse.detach()
        if dout is not None:
            grads = torch.autograd.grad(head_out, leaves, dout[:, head])
            dq[:, head] = grads[0]
            dk[:, kv_head] += grads[1]
            dv[:, kv_head] += grads[2]
    return Oracle(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def _clear(tensor: Tensor, is_used: Tensor) -> Tensor:
    values = tensor.detach().to(is_used.device, torch.float64)
    return values.masked_fill(~is_used[:, None, None], 0.0)


def _attend_head(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    scores = (q @ k.T * softmax_scale).masked_fill(~mask, -torch.inf)
    top = scores.detach().amax(dim=1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    probs = torch.exp(scores - top)
    total = probs.sum(dim=1, keepdim=True)
    out = (probs @ v) / total.masked_fill(total == 0, 1.0)
    return out, (top + torch.log(total))[:, 0]


def assert_matches(name: str, got: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Compares a tensor to the oracle: positions of NaN and infinity, rel-L2, and worst row."""
    got, expected = got.detach().double(), expected.detach().to(got.device, torch.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = int((test(got) != test(expected)).sum())
        assert differs == 0, f"{name}: {differs} of {got.numel()} differ in being {kind}"
    if got.numel() == 0:
        return
    expected = torch.where(torch.isfinite(expected), expected, 0.0)
    error = torch.where(torch.isfinite(got), got, 0.0) - expected
    if float(expected.abs().max()) < 1e-12:
        worst = float(error.abs().max())
        assert worst <= tolerance.zero, f"{name}: {worst:.3g} > {tolerance.zero:.3g} where 0 is due"
        return
    norm = float(expected.norm())
    rel_l2 = float(error.norm()) / norm if norm > 0 else float(error.norm())
    assert rel_l2 <= tolerance.rel_l2, f"{name}: rel-L2 {rel_l2:.3g} > {tolerance.rel_l2:.3g}"
    row_norms = expected.norm(dim=-1)
    floor = float(row_norms.square().mean().sqrt()) or 1.0
    worst_row = float((error.norm(dim=-1) / row_norms.clamp_min(floor)).max())
    assert worst_row <= tolerance.worst_row, (
        f"{name}: worst row {worst_row:.3g} > {tolerance.worst_row:.3g}"
    )


def assert_lse_matches(got: Tensor, expected: Tensor, tolerance: float = LSE_ABS) -> None:
    """Compares log-sum-exps: -inf at the same places, the rest within `tolerance * (1 + |lse|)`."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    assert got.shape == expected.shape, f"lse: shape {got.shape}, expected {expected.shape}"
    assert torch.equal(got == -torch.inf, expected == -torch.inf), "lse: -inf at other places"
    is_finite = expected > -torch.inf
    error = (got - expected)[is_finite].abs() / (1.0 + expected[is_finite].abs())
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= tolerance, f"lse: error {worst:.3g} > {tolerance:.3g}"
