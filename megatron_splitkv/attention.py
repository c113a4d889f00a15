"""Split-KV attention: what it takes and gives, and its place in autograd.

What travels is the business of `routes`: queries to the keys, or keys to the queries. Backward uses
the lse of the whole result and the delta of the whole output, never those of a part.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_splitkv.layout import ShardLayout
from megatron_splitkv.ops.delta import run_delta
from megatron_splitkv.routes.call import (
    DTYPE_NAMES,
    BackwardRows,
    Call,
    KeysValues,
    SplitKVContext,
    paired,
)
from megatron_splitkv.routes.keys import backward_by_keys, forward_by_keys
from megatron_splitkv.routes.queries import backward_by_queries, forward_by_queries

__all__ = ["SplitKVContext", "splitkv_attention"]


def splitkv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SplitKVContext,
    *,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    block_kv: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention of this rank's query rows to the keys of the whole group.

    Every rank of the group calls it together, also a rank without rows.

    Args:
        q: `[num_query_rows, Hq, D]`, the rows of the layout in its order; fp32, bf16 or fp16.
        k: `[num_kv_rows, Hkv, D]`, dtype of q; Hkv divides Hq.
        v: `[num_kv_rows, Hkv, Dv]`, dtype of q.
        context: layout, group and settings.
        softmax_scale: factor of the logits, by default `1 / sqrt(D)`.
        sink: `[Hq]` fp32, for each head the logit of one more key that has no value, or None.
        block_kv: context attention with anchors: keys `[num_query_rows, Hkv, D]` and values
            `[num_query_rows, Hkv, Dv]` of the own query rows' blocks.
    Returns:
        out `[num_query_rows, Hq, Dv]` in the dtype of q, and lse `[num_query_rows, Hq]` fp32,
        natural log. A row without a visible key has out = 0 and lse = -inf. Both have gradients.
    Raises:
        ValueError: the tensors do not fit the layout.
    Source: online softmax, Milakov and Gimelshein 2018; travelling queries, pass-Q (Yang et al.
        2024, inference); keys that stay in training, Split-KV (verl-recipe 2026); keys gathered in
        groups of heads, Llama 3 (2024) and ring-flash-attention.
    """
    _check_tensors(q, k, v, context.layout, block_kv)
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}, needs [{q.shape[1]}]: one logit for each query "
            "head of this rank"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block_k, block_v = block_kv or (None, None)
    # Not in inference, nor in a forward pass that recompute will repeat.
    keeps_gathered = context.config.keep_queries and torch.is_grad_enabled()
    call = Call(context, scale, keeps_gathered)
    return _SplitKVAttention.apply(q, k, v, block_k, block_v, sink, call)


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, block_kv: tuple[Tensor, Tensor] | None
) -> None:
    query_rows, kv_rows, device = layout.num_query_rows, layout.num_kv_rows, layout.kv_index.device
    for name, tensor, rows in (("q", q, query_rows), ("k", k, kv_rows), ("v", v, kv_rows)):
        if tensor.dim() != 3 or len(tensor) != rows:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, needs [{rows}, heads, dim]: this rank's "
                "rows of the plan, in the order of layout.kv_index"
            )
        if tensor.dtype not in DTYPE_NAMES or tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, needs that of q: float32, bfloat16 or float16; "
                f"convert it with {name}.to(...)"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, needs {device}, where the layout is; move one of "
                "them with .to(...)"
            )
        # A kernel would tell, but not where q goes into packed rows alone.
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(2)} in its last dimension, needs 1; "
                f"pass {name}.contiguous()"
            )
    # Before anything is sent: a rank that found it later would leave the others waiting.
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v has shape {list(v.shape)}, needs [{kv_rows}, {k.shape[1]}, any]")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k has shape {list(k.shape)}, needs [any, any, {q.shape[2]}]")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, needs a multiple of the {k.shape[1]} heads of k and v"
        )
    if (block_kv is None) != (layout.block is None):
        raise ValueError(
            "block_kv must be given exactly when the layout has anchors "
            f"(anchors: {layout.block is not None}, block_kv: {block_kv is not None})"
        )
    for name, block, context in zip("kv", block_kv or (), (k, v), strict=False):
        needed = (query_rows, *context.shape[1:])
        if block.shape != needed:
            raise ValueError(
                f"block_kv: {name} has shape {tuple(block.shape)}, needs {needed}: one row for "
                f"each own query row, with the heads and dim of {name}"
            )


class _SplitKVAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_k: Tensor | None,
        block_v: Tensor | None,
        sink: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        layout = call.layout
        q = _clear_padding(q, layout.query_padding)
        k, v = (_clear_padding(tensor, layout.kv_padding) for tensor in (k, v))
        # Rounded at once where all of a row comes from one call.
        is_once = block_k is None and sink is None and not (layout.own and layout.stages)
        out_dtype = q.dtype if is_once else torch.float32
        keys, block = KeysValues(k, v), paired(block_k, block_v)
        if layout.keys is None:
            out, lse, kept = forward_by_queries(q, keys, block, call, out_dtype)
        else:
            out, lse, kept = forward_by_keys(q, keys, call, out_dtype)
        if sink is not None:
            _merge_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.call = call
        ctx.kept = kept
        ctx.save_for_backward(q, k, v, block_k, block_v, sink, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator hides ctx)
        ctx: Any,  # noqa: ANN401
        *grad_outputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = grad_outputs
        q, k, v, block_k, block_v, sink, out, lse = ctx.saved_tensors
        padding = ctx.call.layout.query_padding
        # `out.sum()` gives one expanded number, and kernels need dense rows.
        dout = torch.zeros_like(out) if dout is None else _clear_padding(dout, padding).contiguous()
        delta = run_delta(dout, out)
        if dlse is not None:
            delta -= _clear_padding(dlse, padding)
        rows = BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        keys, block = KeysValues(k, v), paired(block_k, block_v)
        dblock: KeysValues | None = None
        if ctx.call.layout.keys is None:
            dq, dkeys, dblock = backward_by_queries(rows, keys, block, ctx.kept, ctx.call)
        else:
            dq, dkeys = backward_by_keys(rows, keys, ctx.kept, ctx.call)
        dsink = None if sink is None else -(_weight(sink, lse) * delta).sum(0).to(sink.dtype)
        return dq, *dkeys, *(dblock or (None, None)), dsink, None


def _merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Adds one key of logit `sink` and value 0 to every row, in place."""
    total = torch.logaddexp(lse, sink)
    out.mul_(_weight(lse, total)[..., None])
    lse.copy_(total)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """Share `exp(lse - total)` of a part in the whole; 0 where the whole is empty."""
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))


def _clear_padding(tensor: Tensor, padding: Tensor | None) -> Tensor:
    """Zeroes pad rows, so that garbage in them cannot reach a sum."""
    if padding is None:
        return tensor
    return tensor.masked_fill(padding.view(-1, *[1] * (tensor.dim() - 1)), 0.0)
