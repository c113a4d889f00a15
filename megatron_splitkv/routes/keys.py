"""Keys travel to the query rows; their gradients come back.

    forward   k, v --gather--> ranks with rows that see them --attention--> out, lse
    backward  k, v --gather--> attention backward: dq is final and local;
              dk, dv --return--> owner --sum--> dk, dv

For self-attention with fewer KV heads than query heads: keys and values of a token are then fewer
bytes than its query and output, each row is attended to by one kernel call and no partial outputs
are merged. What is gathered grows with the context, as it does not where queries travel.

Documents that are whole on a rank come first and need no network. The KV heads of the others follow
in groups: while one group is computed, the keys of the next and the gradients of the last are in
flight, and no more is held than that. Two groups are sent before anything is computed: another rank
may need them while this one is still busy with whole documents.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_splitkv.comm import Pending, RowFormat, Transport, chosen_rows
from megatron_splitkv.layout import KeyLayout, Segment
from megatron_splitkv.ops.add import run_add
from megatron_splitkv.ops.partial_attention import partial_attention_backward, run_forward
from megatron_splitkv.plan import num_head_groups
from megatron_splitkv.routes.call import BackwardRows, Call, KeysValues
from megatron_splitkv.wire import PartialFormat


def forward_by_keys(
    q: Tensor, keys: KeysValues, call: Call, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns out `[rows, Hq, Dv]`, lse, and gathered keys that are to be kept."""
    out = q.new_empty((*q.shape[:2], keys.v.shape[2]), dtype=out_dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    gathered = _Gathered(q, keys, call)
    kept: list[Tensor] = []

    def attend(segments: Sequence[Segment], heads: slice, k: Tensor, v: Tensor) -> None:
        for segment in segments:
            place, seen = (segment.rows, heads), segment.intervals
            run_forward(
                q[place], k[segment.keys], v[segment.keys], seen.begin, seen.end, out[place],
                lse[place], softmax_scale=call.softmax_scale, work=call.context.work_on(seen),
            )  # fmt: skip

    gathered.start()
    attend(gathered.layout.whole, slice(None), *keys)
    for group in gathered.groups:
        packed = gathered.next()
        if call.keeps_gathered:
            kept.append(packed)
        attend(gathered.layout.shared, group.query_heads, *group.key_format.unpack(packed))
    return out, lse, kept


def backward_by_keys(
    rows: BackwardRows, keys: KeysValues, kept: list[Tensor], call: Call
) -> tuple[Tensor, KeysValues]:
    """Returns dq of the own rows and the gradients of the local keys, in the dtype of the inputs.

    Args:
        kept: what the forward pass kept; empty where keys are gathered once more.
    """
    dq = torch.empty_like(rows.q)
    dkeys = keys.empty_gradients(num_calls=1)
    gathered = _Gathered(rows.q, keys, call, kept)

    def attend(
        segments: Sequence[Segment], heads: slice, to: KeysValues, gradients: KeysValues
    ) -> None:
        for segment in segments:
            place, seen, span = (segment.rows, heads), segment.intervals, segment.keys
            dq[place] = partial_attention_backward(
                rows.dout[place], rows.q[place], to.k[span], to.v[span], rows.lse[place],
                rows.delta[place], seen.begin, seen.end, gradients.k[span], gradients.v[span],
                softmax_scale=call.softmax_scale, accumulate=False,
                work=call.context.work_on(seen),
            )  # fmt: skip

    gathered.start()
    attend(gathered.layout.whole, slice(None), keys, dkeys)
    returning: _Returning | None = None
    for group in gathered.groups:
        to = KeysValues(*group.key_format.unpack(gathered.next()))
        partial = to.empty_gradients(num_calls=2)
        attend(gathered.layout.shared, group.query_heads, to, partial)
        following = gathered.give_back(group, partial)
        del to, partial
        if returning is not None:
            returning.add_to(dkeys, gathered.layout)
        returning = following
    if returning is not None:
        returning.add_to(dkeys, gathered.layout)
    return dq, dkeys


class _Group(NamedTuple):
    """KV heads that travel together, and the query heads that read them.

    Attributes:
        key_heads, query_heads: of the tensors of this rank.
        key_format: how the keys and values of a token travel.
        gradient_format: how its dk and dv do.
    """

    key_heads: slice
    query_heads: slice
    key_format: RowFormat
    gradient_format: PartialFormat

    def of(self, keys: KeysValues) -> KeysValues:
        """The heads of the group."""
        return KeysValues(*(x[:, self.key_heads] for x in keys))


class _Returning(NamedTuple):
    """Gradients of a group on their way to the owners of the keys."""

    group: _Group
    pending: Pending

    def add_to(self, dkeys: KeysValues, layout: KeyLayout) -> None:
        """Writes the sums of what all ranks return."""
        packed = self.pending.wait()
        parts = self.group.gradient_format.unpack(packed)
        for total, part in zip(dkeys, parts, strict=True):
            for segment in layout.shared:
                run_add(
                    total[segment.rows, self.group.key_heads], part.values, segment.return_ptr,
                    segment.return_slots, part.scale, accumulate=False,
                )  # fmt: skip


class _Gathered:
    """The keys of shared documents in the order of the stream, group by group.

    Attributes:
        groups: of the heads that travel; none where no document is shared.
    """

    def __init__(
        self, q: Tensor, keys: KeysValues, call: Call, kept: Sequence[Tensor] = ()
    ) -> None:
        """Takes query rows and keys of this rank, and what need not be gathered again."""
        assert call.layout.keys is not None, "keys travel"
        self.layout = call.layout.keys
        self.groups: list[_Group] = []
        self._transport: Transport | None = call.context.transport
        self._keys = keys
        self._kept = deque(kept)
        self._arriving: deque[Pending] = deque()
        if self._transport is not None and self.layout.counts.any():  # the same on all ranks
            self.groups = _groups(q, keys, call, self.layout.most_rows)
        self._waiting = deque(() if kept else self.groups)

    def start(self) -> None:
        """Sends the own keys of the first groups."""
        self._send()
        self._send()

    def next(self) -> Tensor:
        """Packed keys of the group that was sent first, in stream order; sends another one."""
        if self._kept:
            return self._kept.popleft()
        received = self._arriving.popleft().wait()
        self._send()
        return chosen_rows(received, self.layout.order)

    def give_back(self, group: _Group, partial: KeysValues) -> _Returning:
        """Sends gradients of gathered keys to their owners."""
        assert self._transport is not None, "groups of keys travel"
        counts, form = self.layout.counts.T, group.gradient_format
        buffer = self._transport.send_buffer(counts, form.row_bytes, partial.k.device)
        packed = form.pack(partial, rows=self.layout.arrival, into=buffer)
        return _Returning(group, self._transport.exchange(packed, counts))

    def _send(self) -> None:
        if not self._waiting:
            return
        assert self._transport is not None, "groups of keys travel"
        group = self._waiting.popleft()
        counts, form, sent = self.layout.counts, group.key_format, group.of(self._keys)
        buffer = self._transport.send_buffer(counts, form.row_bytes, sent.k.device)
        packed = form.pack(sent, self.layout.send_rows, into=buffer)
        self._arriving.append(self._transport.exchange(packed, counts))


def _groups(q: Tensor, keys: KeysValues, call: Call, most_rows: int) -> list[_Group]:
    num_heads, num_stages = keys.k.shape[1], call.context.config.num_stages
    size = num_heads // num_head_groups(num_heads, q.shape[1], most_rows, num_stages)
    per_key = q.shape[1] // num_heads
    dims = [x.shape[2] for x in keys]
    return [
        _Group(
            key_heads=slice(first, first + size),
            query_heads=slice(first * per_key, (first + size) * per_key),
            key_format=RowFormat(tuple(((size, dim), q.dtype) for dim in dims)),
            gradient_format=call.partial_format(q.dtype, size, *dims, has_lse=False),
        )
        for first in range(0, num_heads, size)
    ]
