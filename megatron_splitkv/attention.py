"""Split-KV attention: the order of steps, forward and backward.

    forward   q --gather--> ranks with visible keys --partial attention--> (out, lse) --return-->
              owner --merge--> out, lse
    backward  dout, lse, delta, q --gather--> partial backward: dk, dv are final and local;
              dq partials --return--> owner --sum--> dq

Backward uses the merged lse and the delta of the merged output. A rank's own rows come first and
need no network; the rows of the other ranks follow in stages, the next one in flight while this
one is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_splitkv.comm import RowFormat, Transport, gather_rows, return_rows
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import ExchangeStage, KeyIntervals, ShardLayout
from megatron_splitkv.ops.merge import merge_partials_
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward

_WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKVContext:
    """What the attention calls of one microbatch run on besides their tensors.

    Attributes:
        layout: this rank's part of the plan, on the device of the tensors.
        transport: the context-parallel group; None only where `layout.cp_size` is 1.
        config: settings of the run.
    """

    layout: ShardLayout
    transport: Transport | None
    config: SplitKVConfig = field(default_factory=SplitKVConfig)

    def __post_init__(self) -> None:
        layout, group = self.layout, self.transport
        size, rank = (1, 0) if group is None else (group.size, group.rank)
        if (size, rank) != (layout.cp_size, layout.cp_rank):
            got = "no transport" if group is None else f"rank {rank} of a group of {size}"
            raise ValueError(
                f"layout is for rank {layout.cp_rank} of cp_size={layout.cp_size}, but got {got}; "
                "pass the transport of the context-parallel group that the plan was made for"
            )


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
        2024, inference); keys that stay in training, Split-KV (verl-recipe 2026).
    """
    _check_tensors(q, k, v, context.layout, block_kv)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block_k, block_v = block_kv or (None, None)
    return _SplitKVAttention.apply(q, k, v, block_k, block_v, sink, _Call(context, scale))


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, layout: ShardLayout, block_kv: tuple[Tensor, Tensor] | None
) -> None:
    query_rows, kv_rows = layout.num_query_rows, layout.num_kv_rows
    for name, tensor, rows in (("q", q, query_rows), ("k", k, kv_rows), ("v", v, kv_rows)):
        if tensor.dim() != 3 or len(tensor) != rows:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, needs [{rows}, heads, dim]: this rank's "
                "rows of the plan, in the order of layout.kv_index"
            )
    if (block_kv is None) != (layout.block is None):
        raise ValueError(
            "block_kv must be given exactly when the layout has anchors "
            f"(anchors: {layout.block is not None}, block_kv: {block_kv is not None})"
        )


class _Call(NamedTuple):
    context: SplitKVContext
    softmax_scale: float

    @property
    def layout(self) -> ShardLayout:
        return self.context.layout

    @property
    def wire_dtype(self) -> torch.dtype:
        return _WIRE_DTYPES[self.context.config.partial_dtype]


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
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        q = _clear_padding(q, call.layout.query_padding)
        k, v = (_clear_padding(tensor, call.layout.kv_padding) for tensor in (k, v))
        out, lse, kept_queries = _forward(q, k, v, block_k, block_v, call)
        if sink is not None:
            _merge_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.call = call
        ctx.kept_queries = kept_queries
        ctx.save_for_backward(q, k, v, block_k, block_v, sink, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # noqa: ANN205
        ctx: Any,  # noqa: ANN401
        dout: Tensor | None,
        dlse: Tensor | None,
    ):
        q, k, v, block_k, block_v, sink, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        padding = call.layout.query_padding
        # `out.sum()` gives one expanded number, and kernels need dense rows.
        dout = torch.zeros_like(out) if dout is None else _clear_padding(dout, padding).contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        if dlse is not None:
            delta -= _clear_padding(dlse, padding)
        rows = _BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        grads = _backward(rows, k, v, block_k, block_v, ctx.kept_queries, call)
        dsink = None if sink is None else -(_weight(sink, lse) * delta).sum(0).to(sink.dtype)
        return *grads, dsink, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackwardRows:
    """Query rows as the partial backward needs them: `[R, Hq, *]`, lse and delta merged."""

    dout: Tensor
    q: Tensor
    lse: Tensor
    delta: Tensor


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block_k: Tensor | None, block_v: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns merged out `[rows, Hq, Dv]` fp32, lse, and gathered queries that are to be kept."""
    layout = call.layout
    heads, dim_v = q.shape[1], v.shape[2]
    out = q.new_empty(len(q), heads, dim_v, dtype=torch.float32)
    lse = q.new_empty(len(q), heads, dtype=torch.float32)
    query_format = RowFormat(((q.shape[1:], q.dtype),))
    partial_format = RowFormat((((heads, dim_v), call.wire_dtype), ((heads,), torch.float32)))
    kept: list[Tensor] = []

    def attend(rows: Tensor, keys: Tensor, values: Tensor, seen: KeyIntervals):  # noqa: ANN202
        return partial_attention(
            rows, keys, values, seen.begin, seen.end, softmax_scale=call.softmax_scale
        )

    def attend_own() -> None:
        for merged, partial in zip((out, lse), attend(q, k, v, layout.own), strict=True):
            merged.copy_(partial)
        if layout.block is not None:
            each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            partial = attend(q, block_k, block_v, layout.block)
            merge_partials_(out, lse, *partial, each, each[:-1])

    def attend_gathered(stage: ExchangeStage, packed: Tensor) -> Tensor:
        (rows,) = query_format.unpack(packed)
        if call.context.config.keep_queries:
            kept.append(rows)
        return partial_format.pack(attend(rows, k, v, stage.intervals))

    def merge(stage: ExchangeStage, packed: Tensor) -> None:
        partial = partial_format.unpack(packed)
        merge_partials_(out, lse, *partial, stage.return_ptr, stage.return_slots)

    _run_stages(call, lambda rows: query_format.pack([q], rows), attend_own, attend_gathered, merge)
    return out, lse, kept


def _backward(
    rows: _BackwardRows,
    k: Tensor,
    v: Tensor,
    block_k: Tensor | None,
    block_v: Tensor | None,
    kept_queries: list[Tensor],
    call: _Call,
) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv, dblock_k, dblock_v in the dtypes of their inputs."""
    layout, q = call.layout, rows.q
    inputs = (q, k, v, block_k, block_v)
    dq, dk, dv, dblock_k, dblock_v = (
        None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in inputs
    )
    sent_format, sent = _backward_wire(rows, has_queries=not kept_queries)
    dq_format = RowFormat(((q.shape[1:], call.wire_dtype),))
    kept = iter(kept_queries)

    def attend(rows: _BackwardRows, keys: Tensor, values: Tensor, seen: KeyIntervals, dk, dv):  # noqa: ANN001, ANN202
        return partial_attention_backward(
            rows.dout, rows.q, keys, values, rows.lse, rows.delta, seen.begin, seen.end, dk, dv,
            softmax_scale=call.softmax_scale,
        )  # fmt: skip

    def attend_own() -> None:
        dq.add_(attend(rows, k, v, layout.own, dk, dv))
        if layout.block is not None:
            dq.add_(attend(rows, block_k, block_v, layout.block, dblock_k, dblock_v))

    def attend_gathered(stage: ExchangeStage, packed: Tensor) -> Tensor:
        dout, lse, delta, *queries = sent_format.unpack(packed)
        q = queries[0] if queries else next(kept)
        gathered = _BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        return dq_format.pack([attend(gathered, k, v, stage.intervals, dk, dv)])

    def add(stage: ExchangeStage, packed: Tensor) -> None:
        (partials,) = dq_format.unpack(packed)
        counts = stage.send_counts  # rows of one peer are distinct, so each sum has a fixed order
        for index, partial in zip(
            stage.send_rows.split(counts), partials.split(counts), strict=True
        ):
            dq.index_add_(0, index, partial.float())

    _run_stages(call, lambda index: sent_format.pack(sent, index), attend_own, attend_gathered, add)
    grads = (dq, dk, dv, dblock_k, dblock_v)
    return tuple(None if x is None else g.to(x.dtype) for x, g in zip(inputs, grads, strict=True))


def _backward_wire(rows: _BackwardRows, *, has_queries: bool) -> tuple[RowFormat, list[Tensor]]:
    sent = [rows.dout, rows.lse, rows.delta] + ([rows.q] if has_queries else [])
    return RowFormat(tuple((tensor.shape[1:], tensor.dtype) for tensor in sent)), sent


def _run_stages(
    call: _Call,
    pack: Callable[[Tensor | None], Tensor],
    compute_own: Callable[[], None],
    compute: Callable[[ExchangeStage, Tensor], Tensor],
    consume: Callable[[ExchangeStage, Tensor], None],
) -> None:
    """Own rows, then each stage: gather, compute, return, consume.

    The gather of the next stage and the return of the last one are in flight during the compute
    of this one. The order of collectives is that of the layout, the same on every rank.
    """
    stages, transport = call.layout.stages, call.context.transport
    if transport is None or not stages:
        return compute_own()
    arriving = gather_rows(pack, stages[0], transport)
    compute_own()
    returning = None
    for index, stage in enumerate(stages):
        rows = arriving.wait()
        if index + 1 < len(stages):
            arriving = gather_rows(pack, stages[index + 1], transport)
        answer = compute(stage, rows)
        if returning is not None:
            consume(stages[index - 1], returning.wait())
        returning = return_rows(answer, stage, transport)
    consume(stages[-1], returning.wait())


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
