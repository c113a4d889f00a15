"""Queries travel to the keys, partial results come back: Split-KV.

    forward   q --gather--> ranks with visible keys --partial attention--> (out, lse) --return-->
              owner --merge--> out, lse
    backward  dout, lse, delta, q --gather--> partial backward: dk, dv are final and local;
              dq partials --return--> owner --sum--> dq

Backward uses the merged lse and the delta of the merged output. A rank's own rows come first and
need no network; the rows of the other ranks follow in stages. While one stage is computed, the rows
of the next and the answers to the last are in flight. Where rows are few beside the keys, the own
ones are part of the only stage.
"""

import torch
from torch import Tensor

from megatron_splitkv.comm import RowFormat
from megatron_splitkv.layout import ExchangeStage, KeyIntervals
from megatron_splitkv.ops.add import run_add
from megatron_splitkv.ops.merge import run_merge
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward
from megatron_splitkv.routes.call import BackwardRows, Call, KeysValues
from megatron_splitkv.routes.stages import run_stages


def forward_by_queries(
    q: Tensor, keys: KeysValues, block: KeysValues | None, call: Call, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns merged out `[rows, Hq, Dv]`, lse, and gathered queries that are to be kept."""
    layout = call.layout
    query_format = RowFormat(((q.shape[1:], q.dtype),))
    partial_format = call.partial_format(q.dtype, q.shape[1], keys.v.shape[2], has_lse=True)
    kept: list[Tensor] = []

    def attend(
        rows: Tensor, to: KeysValues, seen: KeyIntervals, out_dtype: torch.dtype
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
        if call.keeps_gathered:
            kept.append(rows)
        return attend(rows, keys, stage.intervals, partial_format.compute_dtype)

    def merge(merged: tuple[Tensor, Tensor], stage: ExchangeStage, packed: Tensor) -> None:
        (part,) = partial_format.unpack(packed)
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


def backward_by_queries(
    rows: BackwardRows,
    keys: KeysValues,
    block: KeysValues | None,
    kept_queries: list[Tensor],
    call: Call,
) -> tuple[Tensor, KeysValues, KeysValues | None]:
    """Returns dq of the own rows, and the gradients of the local keys and of the blocks, all in
    the dtype of the inputs.
    """
    layout = call.layout
    num_calls = len(layout.stages) + (layout.own is not None)
    dkeys = keys.empty_gradients(num_calls=num_calls)  # written by the first rows, then added to
    dblock = None if block is None else block.empty_gradients(num_calls=1)
    sent = [rows.dout, rows.lse, rows.delta] + ([] if kept_queries else [rows.q])
    sent_format = RowFormat(tuple((tensor.shape[1:], tensor.dtype) for tensor in sent))
    dq_format = call.partial_format(rows.q.dtype, *rows.q.shape[1:], has_lse=False)
    kept = iter(kept_queries)

    def attend(
        part: BackwardRows,
        to: KeysValues,
        seen: KeyIntervals,
        gradients: KeysValues,
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
        part = BackwardRows(dout=dout, q=q, lse=lse, delta=delta)
        is_added = layout.own is not None
        return (attend(part, keys, stage.intervals, dkeys, accumulate=is_added),)

    def add(dq: Tensor, stage: ExchangeStage, packed: Tensor) -> None:
        (part,), rows = dq_format.unpack(packed), slice(*stage.returned)
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
