"""What one rank needs where keys travel to its query rows."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.layout.intervals import KeyIntervals
from megatron_splitkv.layout.shard import expand_ranges
from megatron_splitkv.plan import KeyExchange, Plan
from megatron_splitkv.plan.plan import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Consecutive own tokens of whole documents, or of shared ones.

    Attributes:
        rows: local query rows.
        keys: all keys that they see: local ones, the same as `rows`, or gathered ones.
        intervals: what each of the rows sees of these keys.
    """

    rows: slice
    keys: slice
    intervals: KeyIntervals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSegment(Segment):
    """A segment of shared documents, whose keys travel.

    Attributes:
        return_ptr, return_slots: CSR over the own tokens of the segment, int32: which of the S
            returned gradients belong to each, in rank order.
    """

    return_ptr: Tensor
    return_slots: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyLayout:
    """Keys of shared documents travel; those of whole ones are attended to where they lie.

    Keys travel grouped by peer in rank order, and inside a peer in stream order, on both ends. Each
    rank also sends to itself, so that what it gathered is complete.

    Attributes:
        most_rows: query rows of the rank that owns most.
        whole: segments of documents whose tokens are all on this rank.
        shared: segments of the others.
        send_rows: `[S]` int64, local KV row of each one sent.
        counts: `[cp_size, cp_size]` int64 on the host, rows that each rank sends to each rank, to
            itself too; the same on all of them.
        order: `[R]` int64, which of the R received rows comes where in stream order, in which rows
            attend to them.
        arrival: `[R]` int64, the inverse: where each received row is in stream order.
    """

    most_rows: int
    whole: tuple[Segment, ...]
    shared: tuple[SharedSegment, ...]
    send_rows: Tensor
    counts: Int64Array
    order: Tensor
    arrival: Tensor


def build_key_layout(
    plan: Plan,
    exchange: KeyExchange,
    kv_index: Int64Array,
    row_intervals: Int64Array,
    cp_rank: int,
) -> KeyLayout:
    """Derives one rank's part of a key exchange.

    Args:
        plan: the placement.
        exchange: of the plan.
        kv_index: pack index of each local token, ascending.
        row_intervals: keys of the pack that each token sees, `[num_tokens, 2]`.
        cp_rank: rank in the context-parallel group.
    """
    ranks = range(plan.cp_size)
    sent = np.concatenate([expand_ranges(exchange.ranges(cp_rank, peer)) for peer in ranks])
    received = np.concatenate([expand_ranges(exchange.ranges(peer, cp_rank)) for peer in ranks])
    order = np.argsort(received, kind="stable")
    gathered = received[order]
    send_rows = np.searchsorted(kv_index, sent)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(send_rows, minlength=len(kv_index)))])
    slots = np.argsort(send_rows, kind="stable")
    whole: list[Segment] = []
    shared: list[SharedSegment] = []
    begin = 0
    runs = plan.runs[plan.runs[:, 0] == cp_rank]
    for is_shared, group in groupby(runs, key=lambda run: bool(exchange.is_shared[run[1]])):
        end = begin + sum(int(run[3] - run[2]) for run in group)
        rows = slice(begin, end)
        seen = row_intervals[kv_index[rows]]
        if is_shared:
            keys = _span(gathered, seen)
            returned = pointers[begin : end + 1]
            shared.append(
                SharedSegment(
                    rows=rows,
                    keys=keys,
                    intervals=KeyIntervals.among(gathered[keys], seen),
                    return_ptr=_int32(returned - returned[0]),
                    return_slots=_int32(slots[returned[0] : returned[-1]]),
                )
            )
        else:
            intervals = KeyIntervals.among(kv_index[rows], seen)
            whole.append(Segment(rows=rows, keys=rows, intervals=intervals))
        begin = end
    return KeyLayout(
        most_rows=max(plan.tokens),
        whole=tuple(whole),
        shared=tuple(shared),
        send_rows=torch.from_numpy(send_rows),
        counts=exchange.counts,
        order=torch.from_numpy(order),
        arrival=torch.from_numpy(np.argsort(order)),
    )


def _int32(values: Int64Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _span(keys: Int64Array, seen: Int64Array) -> slice:
    """From the first to the last of sorted `keys` that intervals of the pack `[n, 2]` hold."""
    bounds = np.searchsorted(keys, seen)
    bounds = bounds[bounds[:, 0] < bounds[:, 1]]
    begin = int(bounds[:, 0].min(initial=len(keys)))
    return slice(begin, int(bounds[:, 1].max(initial=begin)))
