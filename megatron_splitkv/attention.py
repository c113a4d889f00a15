"""Split-KV attention: the order of steps, forward and backward.

    forward   q --gather--> ranks with visible keys --partial attention--> (out, lse) --return-->
              owner --merge--> out, lse
    backward  dout, lse, delta, q --gather--> partial backward: dk, dv are final and local;
              dq partials --return--> owner --sum--> dq

Backward uses the merged lse and the delta of the merged output. A rank's own rows come first and
need no network; the rows of the other ranks follow in stages. While one stage is computed, the rows
of the next and the answers to the last are in flight. Where rows are few beside the keys, the own
ones are part of the only stage.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_splitkv.comm import RowFormat, Transport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import ExchangeStage, KeyIntervals, ShardLayout
from megatron_splitkv.ops.add import run_add
from megatron_splitkv.ops.delta import run_delta
from megatron_splitkv.ops.merge import run_merge
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward
from megatron_splitkv.ops.work_lists import WorkLists
from megatron_splitkv.stages import run_stages
from megatron_splitkv.wire import PartialFormat

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    _work: dict[KeyIntervals, WorkLists] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        layout, group = self.layout, self.transport
        size, rank = (1, 0) if group is None else (group.size, group.rank)
        if (size, rank) != (layout.cp_size, layout.cp_rank):
            got = "no transport" if group is None else f"rank {rank} of a group of {size}"
            raise ValueError(
                f"layout is for rank {layout.cp_rank} of cp_size={layout.cp_size}, but got {got}; "
                "pass the transport of the context-parallel group that the plan was made for"
            )

    def work_on(self, seen: KeyIntervals) -> WorkLists:
        """What the kernels do for these intervals, worked out once for all layers."""
        work = self._work.get(seen)
        if work is None:
            work = self._work[seen] = WorkLists(
                seen.begin_on_host,
                seen.end_on_host,
                is_deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        return work


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
    if sink is not None and sink.shape != q.shape[1:2]:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}, needs [{q.shape[1]}]: one logit for each query "
            "head of this rank"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block_k, block_v = block_kv or (None, None)
    # Not in inference, nor in a forward pass that recompute will repeat.
    keeps_queries = context.config.keep_queries and torch.is_grad_enabled()
    call = _Call(context, scale, keeps_queries)
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
        if tensor.dtype not in _DTYPE_NAMES or tensor.dtype != q.dtype:
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


class _Call(NamedTuple):
    context: SplitKVContext
    softmax_scale: float
    keeps_queries: bool

    @property
    def layout(self) -> ShardLayout:
        return self.context.layout

    def partial_format(self, q: Tensor, dim: int, *, has_lse: bool) -> PartialFormat:
        """The wire row of partials `[R, Hq, dim]` that answer query rows like q."""
        partial_dtype = self.context.config.resolved_partial_dtype(_DTYPE_NAMES[q.dtype])
        return PartialFormat(
            partial_dtype=partial_dtype, num_heads=q.shape[1], dim=dim, has_lse=has_lse
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
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        layout = call.layout
        q = _clear_padding(q, layout.query_padding)
        k, v = (_clear_padding(tensor, layout.kv_padding) for tensor in (k, v))
        # Rounded at once where all of a row comes from one call.
        is_once = block_k is None and sink is None and not (layout.own and layout.stages)
        out_dtype = q.dtype if is_once else torch.float32
        keys, block = _KeysValues(k, v), _paired(block_k, block_v)
        out, lse, kept_queries = _forward(q, keys, block, call, out_dtype)
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
        rows = _BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        keys, block = _KeysValues(k, v), _paired(block_k, block_v)
        dq, dkeys, dblock = _backward(rows, keys, block, ctx.kept_queries, ctx.call)
        dsink = None if sink is None else -(_weight(sink, lse) * delta).sum(0).to(sink.dtype)
        return dq, *dkeys, *(dblock or (None, None)), dsink, None


class _KeysValues(NamedTuple):
    """One set of KV rows, `[rows, Hkv, D]` and `[rows, Hkv, Dv]`, or their gradients."""

    k: Tensor
    v: Tensor

    def empty_gradients(self, *, num_calls: int) -> "_KeysValues":
        """What so many calls write: summed in fp32, or rounded by the only one."""
        dtype = torch.float32 if num_calls > 1 else self.k.dtype
        return _KeysValues(*(torch.empty_like(x, dtype=dtype) for x in self))

    def to(self, dtype: torch.dtype) -> "_KeysValues":
        return _KeysValues(self.k.to(dtype), self.v.to(dtype))


def _paired(k: Tensor | None, v: Tensor | None) -> _KeysValues | None:
    return None if k is None or v is None else _KeysValues(k, v)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackwardRows:
    """Query rows as the partial backward needs them: `[R, Hq, *]`, lse and delta merged."""

    dout: Tensor
    q: Tensor
    lse: Tensor
    delta: Tensor


def _forward(
    q: Tensor, keys: _KeysValues, block: _KeysValues | None, call: _Call, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns merged out `[rows, Hq, Dv]`, lse, and gathered queries that are to be kept."""
    layout = call.layout
    query_format = RowFormat(((q.shape[1:], q.dtype),))
    partial_format = call.partial_format(q, keys.v.shape[2], has_lse=True)
    kept: list[Tensor] = []

    def attend(
        rows: Tensor, to: _KeysValues, seen: KeyIntervals, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return partial_attention(
            rows, to.k, to.v, seen.begin, seen.end, out_dtype=out_dtype,
            softmax_scale=call.softmax_scale, work=call.context.work_on(seen),
        )  # fmt: skip

    def attend_own() -> tuple[Tensor, Tensor]:
        own = None if layout.own is None else attend(q, keys, layout.own, out_dtype)
        if block is None or layout.block is None:
            return own or _unwritten(q, keys.v.shape[2], out_dtype)
        of_block = attend(q, block, layout.block, out_dtype)
        if own is None:
            return of_block
        each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        run_merge(*own, *of_block, each, each[:-1])
        return own

    def attend_gathered(stage: ExchangeStage, packed: Tensor) -> tuple[Tensor, Tensor]:
        (rows,) = query_format.unpack(packed)
        if call.keeps_queries:
            kept.append(rows)
        return attend(rows, keys, stage.intervals, partial_format.compute_dtype)

    def merge(merged: tuple[Tensor, Tensor], stage: ExchangeStage, packed: Tensor) -> None:
        part = partial_format.unpack(packed)
        assert part.lse is not None, "outputs travel with their lse"
        rows = slice(*stage.returned)
        out, lse = merged
        run_merge(
            out[rows], lse[rows], part.values, part.lse, stage.return_ptr, stage.return_slots,
            part.scale, accumulate=layout.has_own_part,
        )  # fmt: skip

    (out, lse), finish = run_stages(
        layout.stages, call.context.transport, (query_format, [q]), partial_format,
        attend_own, attend_gathered, merge,
    )  # fmt: skip
    finish()
    return out, lse, kept


def _backward(
    rows: _BackwardRows,
    keys: _KeysValues,
    block: _KeysValues | None,
    kept_queries: list[Tensor],
    call: _Call,
) -> tuple[Tensor, _KeysValues, _KeysValues | None]:
    """Returns dq of the own rows, and the gradients of the local keys and of the blocks, all in
    the dtype of the inputs.
    """
    layout = call.layout
    num_calls = len(layout.stages) + (layout.own is not None)
    dkeys = keys.empty_gradients(num_calls=num_calls)  # written by the first rows, then added to
    dblock = None if block is None else block.empty_gradients(num_calls=1)
    sent = [rows.dout, rows.lse, rows.delta] + ([] if kept_queries else [rows.q])
    sent_format = RowFormat(tuple((tensor.shape[1:], tensor.dtype) for tensor in sent))
    dq_format = call.partial_format(rows.q, rows.q.shape[2], has_lse=False)
    kept = iter(kept_queries)

    def attend(
        part: _BackwardRows,
        to: _KeysValues,
        seen: KeyIntervals,
        gradients: _KeysValues,
        *,
        accumulate: bool,
    ) -> Tensor:
        return partial_attention_backward(
            part.dout, part.q, to.k, to.v, part.lse, part.delta, seen.begin, seen.end, *gradients,
            softmax_scale=call.softmax_scale, accumulate=accumulate,
            work=call.context.work_on(seen),
        )  # fmt: skip

    def attend_own() -> Tensor:
        seen = layout.own
        own = None if seen is None else attend(rows, keys, seen, dkeys, accumulate=False)
        if block is None or dblock is None or layout.block is None:
            return torch.empty_like(rows.q) if own is None else own
        of_block = attend(rows, block, layout.block, dblock, accumulate=False)
        return of_block if own is None else own.add_(of_block)

    def attend_gathered(stage: ExchangeStage, packed: Tensor) -> tuple[Tensor]:
        dout, lse, delta, *queries = sent_format.unpack(packed)
        q = queries[0] if queries else next(kept)
        part = _BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        is_added = layout.own is not None
        return (attend(part, keys, stage.intervals, dkeys, accumulate=is_added),)

    def add(dq: Tensor, stage: ExchangeStage, packed: Tensor) -> None:
        part, rows = dq_format.unpack(packed), slice(*stage.returned)
        run_add(
            dq[rows], part.values, stage.return_ptr, stage.return_slots, part.scale,
            accumulate=layout.has_own_part,
        )  # fmt: skip

    dq, finish = run_stages(
        layout.stages, call.context.transport, (sent_format, sent), dq_format,
        attend_own, attend_gathered, add,
    )  # fmt: skip
    dtype = rows.q.dtype
    dkeys = dkeys.to(dtype)  # while the last answers are in flight
    finish()
    return dq.to(dtype), dkeys, dblock


def _unwritten(q: Tensor, dim: int, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for out and lse of rows that are all those of the only stage, which writes them."""
    out = q.new_empty((*q.shape[:2], dim), dtype=out_dtype)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


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
