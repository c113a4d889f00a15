"""`KeyLayout` against dense masks: each rank gathers, in order, the keys that its rows see."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.layout import ShardLayout, build_layout
from megatron_splitkv.layout.key_layout import Segment
from megatron_splitkv.plan import Causal, Full, Plan, Queries, Window, make_plan
from tests.packs import owner_of_tokens, packs, plan_mask, query_specs


class Ranks:
    """Layouts of all ranks where keys travel, and the dense truth beside them."""

    def __init__(self, plan: Plan, queries: Queries | None = None) -> None:
        self.plan = plan
        self.layouts = [build_layout(plan, rank, queries=queries) for rank in range(plan.cp_size)]
        self.keys = [layout.keys for layout in self.layouts]
        self.mask = plan_mask(plan, queries)
        owner = owner_of_tokens(plan)
        self.tokens = [np.flatnonzero(owner == rank) for rank in range(plan.cp_size)]

    def check(self) -> None:
        for rank, layout in enumerate(self.layouts):
            assert layout.own is None
            assert layout.block is None
            assert layout.stages == ()
            assert layout.kv_index.tolist() == self.tokens[rank].tolist()
            assert layout.num_query_rows == len(self.tokens[rank])
            assert self.keys[rank].most_rows == max(self.plan.tokens)
            np.testing.assert_array_equal(self.keys[rank].counts, self.keys[0].counts)
            gathered = self.gathered(rank)
            self.check_segments(rank, layout, gathered)
            self.check_returns(rank)

    def sent(self, source: int, destination: int) -> np.ndarray:
        """Tokens that one rank sends to another, or to itself."""
        keys = self.keys[source]
        assert len(keys.send_rows) == keys.counts[source].sum()
        parts = keys.send_rows.split(keys.counts[source].tolist())
        return self.tokens[source][parts[destination].numpy()]

    def gathered(self, rank: int) -> np.ndarray:
        """Tokens of the received rows in stream order: all of shared documents that it sees."""
        keys = self.keys[rank]
        arrived = np.concatenate([self.sent(peer, rank) for peer in range(self.plan.cp_size)])
        assert len(arrived) == keys.counts[:, rank].sum()
        gathered = arrived[keys.order.numpy()]
        assert (np.diff(gathered) > 0).all()
        assert keys.order[keys.arrival].tolist() == list(range(len(arrived)))
        rows = [self.tokens[rank][segment.rows] for segment in keys.shared]
        seen = self.mask[np.concatenate([*rows, []]).astype(np.int64)].any(axis=0)
        assert gathered.tolist() == np.flatnonzero(seen).tolist()
        return gathered

    def check_segments(self, rank: int, layout: ShardLayout, gathered: np.ndarray) -> None:
        """Each own row is in one segment and sees there all that it sees in the pack."""
        keys, tokens = self.keys[rank], self.tokens[rank]
        owner = owner_of_tokens(self.plan)
        starts = np.cumsum([0, *self.plan.padded_lens])
        met = np.zeros(len(tokens), dtype=int)
        for segments, theirs in ((keys.whole, tokens), (keys.shared, gathered)):
            for segment in segments:
                met[segment.rows] += 1
                rows, columns = tokens[segment.rows], theirs[segment.keys]
                self.check_interval(segment, rows, columns)
                documents = np.searchsorted(starts, rows, side="right") - 1
                is_shared = [
                    self.plan.doc_lens[doc] > 0  # not of pads alone
                    and len({*owner[starts[doc] : starts[doc + 1]]}) > 1
                    for doc in {*documents}
                ]
                assert is_shared == [segments is keys.shared] * len(is_shared)
        assert (met == 1).all()
        assert all(segment.rows == segment.keys for segment in keys.whole)

    def check_interval(self, segment: Segment, rows: np.ndarray, columns: np.ndarray) -> None:
        begin, end = segment.intervals.begin, segment.intervals.end
        assert begin.dtype == end.dtype == torch.int32
        assert len(begin) == len(end) == len(rows) > 0
        begin, end = begin.numpy()[:, None], end.numpy()[:, None]
        assert ((begin >= 0) & (end <= len(columns))).all()
        index = np.arange(len(columns))
        found = np.zeros_like(self.mask[rows])
        found[:, columns] = (begin <= index) & (index < end)
        np.testing.assert_array_equal(found, self.mask[rows])

    def check_returns(self, rank: int) -> None:
        """The CSR lists for each own token which of the sent rows were its own, in rank order."""
        keys = self.keys[rank]
        send_rows = keys.send_rows.tolist()
        listed = 0
        for segment in keys.shared:
            ptr, slots = segment.return_ptr.tolist(), segment.return_slots.tolist()
            assert segment.return_ptr.dtype == segment.return_slots.dtype == torch.int32
            rows = range(segment.rows.start, segment.rows.stop)
            assert len(ptr) == len(rows) + 1
            assert (ptr[0], ptr[-1]) == (0, len(slots))
            listed += len(slots)
            for index, row in enumerate(rows):
                mine = slots[ptr[index] : ptr[index + 1]]
                assert mine == [slot for slot, sent in enumerate(send_rows) if sent == row]
        assert listed == len(send_rows)


@settings(max_examples=150, deadline=None)
@given(packs("cwf", max_length=60), st.integers(1, 5), st.integers(1, 9))
@example(([64], [64], Full()), 4, 1)
@example(([5, 1], [9, 4], Causal()), 8, 1)
@example(([40, 3, 40], [40, 3, 43], Window(3)), 4, 1)
@example(([], [], Causal()), 2, 1)
def test_each_row_sees_its_keys(pack, cp_size, block_size):
    lens, padded, queries = pack
    plan = make_plan(
        lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size, route="keys"
    )
    Ranks(plan).check()


@settings(max_examples=100, deadline=None)
@given(packs("cwf", max_length=60), st.integers(1, 5), st.data())
@example(([60], [60], Causal()), 3, None)
def test_each_row_sees_its_keys_under_another_mask(pack, cp_size, data):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=4, route="keys")
    Ranks(plan, Window(7) if data is None else data.draw(query_specs(lens, "cwf"))).check()


@pytest.mark.parametrize("queries", [Causal(), Window(4), Full()], ids=str)
def test_to_moves_what_kernels_read(queries):
    layout = build_layout(make_plan([30, 9, 8], 3, queries=queries, block_size=2, route="keys"), 1)
    moved = layout.to("meta").keys
    assert moved is not None
    assert layout.keys.shared, "a document lies on several ranks"
    for name in ("send_rows", "order", "arrival"):
        assert getattr(moved, name).is_meta
        assert not getattr(layout.keys, name).is_meta
    for segment in (*moved.whole, *moved.shared):
        assert segment.intervals.begin.is_meta and segment.intervals.end.is_meta
        assert not segment.intervals.begin_on_host.is_meta
    assert all(x.return_ptr.is_meta and x.return_slots.is_meta for x in moved.shared)
    assert moved.counts is layout.keys.counts
    assert [x.rows for x in moved.shared] == [x.rows for x in layout.keys.shared]
