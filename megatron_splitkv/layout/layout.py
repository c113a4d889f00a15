"""`ShardLayout`: what one rank holds, sends, receives and sees, for one attention call."""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.layout.intervals import KeyIntervals
from megatron_splitkv.layout.key_layout import KeyLayout, Segment, build_key_layout
from megatron_splitkv.layout.shard import expand_ranges, token_index
from megatron_splitkv.plan import (
    Anchors,
    Plan,
    Queries,
    RowExchange,
    StageRows,
    plan_exchange,
    plan_key_exchange,
)
from megatron_splitkv.plan.plan import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeStage:
    """One exchange of some of the query rows of every rank.

    All answers to a row come back in the same stage. Rows travel grouped by peer in rank order, and
    inside a peer in stream order, on both ends.

    Attributes:
        send_rows: `[S]` int64, local query row of each row sent.
        counts: `[cp_size, cp_size]` int64 on the host, rows that each rank sends to each rank; the
            same on all of them.
        is_all_gather: every rank sends all its rows to every other one, equally many.
        intervals: keys that the `R` received rows see here.
        returned: local query rows `[begin, end)` that get something back, the first to the last;
            all of them where none has been done before.
        return_ptr, return_slots: CSR over these rows, int32 `[end - begin + 1]` and `[S]`: which
            of the S returned partials belong to each row, in rank order.
    """

    send_rows: Tensor
    counts: Int64Array
    is_all_gather: bool
    intervals: KeyIntervals
    returned: tuple[int, int]
    return_ptr: Tensor
    return_slots: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardLayout:
    """Everything one rank needs to run one attention call; made once, used by all layers.

    Attributes:
        fingerprint: of the plan.
        cp_size, cp_rank: the place in the group.
        kv_index: `[num_kv_rows]` int64, pack index of each local token, ascending.
        positions: `[num_kv_rows]` int64, position of each local token in its document.
        num_query_rows: query rows that this rank owns.
        keys: where keys travel, all of the exchange; else None.
        own: local keys that the own query rows see; None where keys travel, and where own rows are
            among those of the only stage, as they are few beside the keys.
        block: context attention with anchors: rows of the own-block keys that each own query row
            sees, else None.
        kv_padding: `[num_kv_rows]` bool, True at pads; None when the pack has none.
        query_padding: likewise for the own query rows, `[num_query_rows]`.
        stages: exchanges of query rows with the other ranks, without those of no row at all.
    """

    fingerprint: str
    cp_size: int
    cp_rank: int
    kv_index: Tensor
    positions: Tensor
    num_query_rows: int
    keys: KeyLayout | None
    own: KeyIntervals | None
    block: KeyIntervals | None
    kv_padding: Tensor | None
    query_padding: Tensor | None
    stages: tuple[ExchangeStage, ...]

    @property
    def num_kv_rows(self) -> int:
        """KV rows that live on this rank."""
        return self.kv_index.numel()

    @property
    def has_own_part(self) -> bool:
        """Whether own query rows have a result before a stage brings them one."""
        return self.own is not None or self.block is not None

    def to(self, device: torch.device | str) -> Self:
        """The same layout with its tensors on `device`, except those that stay on the host."""
        return _to_device(self, torch.device(device))


def _to_device[T](value: T, device: torch.device) -> T:
    if isinstance(value, Tensor):
        # Pinned, so that the copy is queued behind what the stream already holds and nobody waits.
        source = value.pin_memory() if device.type == "cuda" else value
        return source.to(device, non_blocking=True)  # type: ignore[return-value]
    if isinstance(value, KeyIntervals):
        begin, end = (_to_device(x, device) for x in (value.begin, value.end))
        return replace(value, begin=begin, end=end)
    if isinstance(value, ExchangeStage | KeyLayout | Segment | ShardLayout):
        moved = {f.name: _to_device(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **moved)
    if isinstance(value, tuple):
        return tuple(_to_device(item, device) for item in value)  # type: ignore[return-value]
    return value


def build_layout(
    plan: Plan, cp_rank: int, *, num_stages: int | None = None, queries: Queries | None = None
) -> ShardLayout:
    """Derives one rank's layout from the plan; pure, on the CPU, without communication.

    Args:
        plan: the placement.
        cp_rank: rank in the context-parallel group.
        num_stages: upper bound on the number of exchanges; None bounds the rows of each instead.
        queries: the mask of this call where it is not the plan's own, see `plan_exchange`.
    Raises:
        ValueError: `cp_rank` outside the group, or `queries` with other query rows.
    """
    if not 0 <= cp_rank < plan.cp_size:
        raise ValueError(f"cp_rank={cp_rank} must lie in [0, {plan.cp_size}) (the plan's cp_size)")
    spec = queries or plan.queries
    kv_index = token_index(plan, cp_rank)
    doc_starts = np.concatenate([[0], np.cumsum(plan.padded_lens, dtype=np.int64)])
    documents = np.searchsorted(doc_starts, kv_index, side="right") - 1
    positions = kv_index - doc_starts[documents]
    is_pad = positions >= np.asarray(plan.doc_lens, dtype=np.int64)[documents]
    padding = torch.from_numpy(is_pad) if plan.doc_lens != plan.padded_lens else None
    row_intervals = plan.model(spec).row_intervals()
    keys, own, num_rows = None, None, len(kv_index)
    stages: tuple[ExchangeStage, ...] = ()
    if plan.route == "keys":
        exchange = plan_key_exchange(plan, spec)
        keys = build_key_layout(plan, exchange, kv_index, row_intervals, cp_rank)
    else:
        exchange = plan_exchange(plan, spec)
        owned = expand_ranges(exchange.owned[cp_rank])
        builder = _StageBuilder(plan, exchange, row_intervals, kv_index, cp_rank)
        own = None if exchange.is_joint else builder.intervals(owned)
        stages, num_rows = builder.stages(owned, num_stages), len(owned)
    return ShardLayout(
        fingerprint=plan.fingerprint,
        cp_size=plan.cp_size,
        cp_rank=cp_rank,
        kv_index=torch.from_numpy(kv_index),
        positions=torch.from_numpy(positions),
        num_query_rows=num_rows,
        keys=keys,
        own=own,
        block=_block_intervals(spec, num_rows),
        kv_padding=padding,
        query_padding=padding if plan.is_self_attention else None,
        stages=stages,
    )


class _StageBuilder:
    """The exchange of one rank in stages; a joint one is a single stage with the own rows."""

    def __init__(
        self,
        plan: Plan,
        exchange: RowExchange,
        row_intervals: Int64Array,
        kv_index: Int64Array,
        cp_rank: int,
    ) -> None:
        self.cp_size = plan.cp_size
        self.cp_rank = cp_rank
        self.exchange = exchange
        self.row_intervals = row_intervals
        self.kv_index = kv_index

    def intervals(self, rows: Int64Array) -> KeyIntervals:
        """Local key ranges of query rows given by their index in the query stream."""
        return KeyIntervals.among(self.kv_index, self.row_intervals[rows])

    def stages(self, owned: Int64Array, num_stages: int | None) -> tuple[ExchangeStage, ...]:
        return tuple(
            self._stage(owned, stage)
            for stage in self.exchange.stages(num_stages)
            if stage.counts.any()  # else no rank has a row in it
        )

    def _stage(self, owned: Int64Array, stage: StageRows) -> ExchangeStage:
        rank, ranks = self.cp_rank, range(self.cp_size)
        sent = np.concatenate([expand_ranges(stage.ranges(rank, peer)) for peer in ranks])
        received = np.concatenate([expand_ranges(stage.ranges(peer, rank)) for peer in ranks])
        send_rows = np.searchsorted(owned, sent)
        begin, end = 0, len(owned)
        if not self.exchange.is_joint:
            begin = int(send_rows.min(initial=end))
            end = int(send_rows.max(initial=begin - 1)) + 1
        times_sent = np.bincount(send_rows - begin, minlength=end - begin)
        pointers = np.concatenate([[0], np.cumsum(times_sent)]).astype(np.int32)
        return ExchangeStage(
            send_rows=torch.from_numpy(send_rows),
            counts=stage.counts,
            is_all_gather=stage.is_all_gather,
            intervals=self.intervals(received),
            returned=(begin, end),
            return_ptr=torch.from_numpy(pointers),
            return_slots=torch.from_numpy(np.argsort(send_rows, kind="stable").astype(np.int32)),
        )


def _block_intervals(queries: Queries, num_rows: int) -> KeyIntervals | None:
    if not isinstance(queries, Anchors):
        return None
    size = queries.rows_per_anchor
    begin = torch.arange(num_rows, dtype=torch.int32) // size * size
    return KeyIntervals.on_host(begin, begin + size)
