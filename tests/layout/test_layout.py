"""`ShardLayout` against dense masks: what each rank holds, sends, receives and sees."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.layout import ExchangeStage, build_layout
from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Plan,
    Queries,
    Suffix,
    Window,
    exchange,
    make_plan,
    plan_exchange,
)
from tests.packs import owner_of_rows, owner_of_tokens, packs, plan_mask, query_specs


def seen_here(intervals, num_rows: int, num_keys: int) -> np.ndarray:
    """Mask `[rows, local keys]` of the intervals, checked for type and bounds."""
    begin, end = intervals.begin, intervals.end
    assert begin.dtype == end.dtype == torch.int32
    assert begin.shape == end.shape == (num_rows,)
    assert begin.is_contiguous()
    assert end.is_contiguous()
    begin, end = begin.numpy()[:, None], end.numpy()[:, None]
    assert ((begin >= 0) & (end <= num_keys)).all()
    keys = np.arange(num_keys)
    return (begin <= keys) & (keys < end)


class Ranks:
    """Layouts of all ranks of a plan, and the dense truth beside them."""

    def __init__(self, plan: Plan, num_stages: int | None, queries: Queries | None = None) -> None:
        self.plan = plan
        self.layouts = [
            build_layout(plan, rank, num_stages=num_stages, queries=queries)
            for rank in range(plan.cp_size)
        ]
        self.mask = plan_mask(plan, queries)
        rows, tokens = owner_of_rows(plan), owner_of_tokens(plan)
        self.rows = [np.flatnonzero(rows == rank) for rank in range(plan.cp_size)]
        self.tokens = [np.flatnonzero(tokens == rank) for rank in range(plan.cp_size)]

    def check_own(self) -> None:
        for rank, layout in enumerate(self.layouts):
            rows, tokens = self.rows[rank], self.tokens[rank]
            assert layout.kv_index.tolist() == tokens.tolist()
            assert (layout.num_kv_rows, layout.num_query_rows) == (len(tokens), len(rows))
            if layout.own is None:
                continue
            own = seen_here(layout.own, len(rows), len(tokens))
            np.testing.assert_array_equal(own, self.mask[np.ix_(rows, tokens)])

    def check_stages(self, num_stages: int) -> None:
        cp_size = self.plan.cp_size
        kinds = {tuple(stage.is_all_gather for stage in layout.stages) for layout in self.layouts}
        assert len(kinds) == 1, "every rank runs the same collectives"
        assert len(self.layouts[0].stages) <= num_stages
        seen = [np.zeros(self.mask.shape, dtype=int) for _ in range(cp_size)]
        sent: list[set[int]] = [set() for _ in range(cp_size)]
        for stages in zip(*(layout.stages for layout in self.layouts), strict=True):
            assert stages[0].counts.any()
            for rank, stage in enumerate(stages):
                np.testing.assert_array_equal(stage.counts, stages[0].counts)
                self.check_returns(rank, stage)
                rows = {*stage.send_rows.tolist()}
                assert not rows & sent[rank], "all answers to a row come in one stage"
                sent[rank] |= rows
            for rank in range(cp_size):
                self.check_received(rank, stages, seen[rank])
        for rank in range(cp_size):
            self.check_all_seen(rank, seen[rank])

    def check_returns(self, rank: int, stage: ExchangeStage) -> None:
        """The CSR lists each row's partials, in the order of sending, which is rank order."""
        send_rows = stage.send_rows.tolist()
        ptr, slots = stage.return_ptr.tolist(), stage.return_slots.tolist()
        assert stage.return_ptr.dtype == stage.return_slots.dtype == torch.int32
        assert len(send_rows) == stage.counts[rank].sum() == len(slots)
        begin, end = stage.returned
        assert len(ptr) == end - begin + 1
        assert {*send_rows} <= {*range(begin, end)}
        if self.layouts[rank].own is None:  # no row has anything before
            assert (begin, end) == (0, len(self.rows[rank]))
        else:
            assert not send_rows or {begin, end - 1} <= {*send_rows}
        for row in range(begin, end):
            mine = slots[ptr[row - begin] : ptr[row - begin + 1]]
            assert mine == [slot for slot, sent in enumerate(send_rows) if sent == row]

    def check_received(self, rank: int, stages: list[ExchangeStage], seen: np.ndarray) -> None:
        """What arrives, grouped by source in rank order, with the intervals meant for it."""
        arrived = []
        for source, stage in enumerate(stages):
            sent = stage.send_rows.split(stage.counts[source].tolist())[rank].numpy()
            arrived.append(self.rows[source][sent])
        rows = np.concatenate(arrived)
        assert len(rows) == stages[rank].counts[:, rank].sum()
        tokens = self.tokens[rank]
        intervals = seen_here(stages[rank].intervals, len(rows), len(tokens))
        np.testing.assert_array_equal(intervals, self.mask[np.ix_(rows, tokens)])
        for row, keys in zip(rows, intervals, strict=True):
            seen[row, tokens] += keys

    def check_all_seen(self, rank: int, seen: np.ndarray) -> None:
        """Every visible pair with a key here and a row elsewhere is met exactly once; in a joint
        exchange also those with an own row.
        """
        expected = self.mask.copy()
        if self.layouts[rank].own is not None:
            expected[self.rows[rank]] = False
        expected[:, np.setdiff1d(np.arange(self.mask.shape[1]), self.tokens[rank])] = False
        np.testing.assert_array_equal(seen, expected.astype(int))


@settings(max_examples=150, deadline=None)
@given(packs(max_length=24), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7))
@example(([64], [64], Full()), 4, 1, 1)
@example(([64], [64], Causal()), 2, 1, 1)
@example(([5], [5], Causal()), 8, 1, 3)
@example(([6, 3], [6, 3], Anchors(((0, 6, 6), ()), 2)), 3, 2, 2)
def test_every_pair_is_met_once(pack, cp_size, block_size, num_stages):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size)
    ranks = Ranks(plan, num_stages)
    ranks.check_own()
    ranks.check_stages(num_stages)


@settings(max_examples=60, deadline=None)
@given(packs(max_length=24), st.integers(1, 4), st.integers(1, 4))
@example(([24], [24], Causal()), 2, 2)
def test_every_pair_is_met_once_by_default(pack, cp_size, min_rows):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    with mock.patch.object(exchange, "MIN_STAGE_ROWS", min_rows):
        ranks = Ranks(plan, None)
        ranks.check_own()
        ranks.check_stages(plan_exchange(plan).num_exchanges(None))


@settings(max_examples=60, deadline=None)
@given(packs(max_length=24), st.integers(1, 4), st.integers(1, 4))
def test_every_pair_is_met_once_when_all_rows_are_done_at_once(pack, cp_size, num_stages):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    with mock.patch.object(exchange, "JOINT_KEYS_PER_ROW", 0):
        ranks = Ranks(plan, num_stages)
    for layout in ranks.layouts:
        is_joint = cp_size > 1 and ranks.mask.any()
        assert (layout.own is None) == is_joint
        assert len(layout.stages) == is_joint
    ranks.check_own()
    ranks.check_stages(num_stages)


def test_few_rows_beside_the_keys_are_done_at_once():
    plan = make_plan([1024], 2, queries=Suffix(16), block_size=64)
    assert build_layout(plan, 0).own is None
    assert build_layout(make_plan([1024], 2, queries=Suffix(17), block_size=64), 0).own is not None


@settings(max_examples=60, deadline=None)
@given(packs("cwfp", max_length=24), st.integers(1, 4), st.integers(1, 4), st.data())
def test_another_mask_over_the_same_placement(pack, cp_size, num_stages, data):
    lens, padded, queries = pack
    other = data.draw(query_specs(lens, "cwfp"))
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    ranks = Ranks(plan, num_stages, other)
    ranks.check_own()
    ranks.check_stages(num_stages)


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_stages_of_five_ranks(num_stages):
    ranks = Ranks(make_plan([97, 3, 1], 5, block_size=4), num_stages)
    assert [len(layout.stages) for layout in ranks.layouts] == [num_stages] * 5
    ranks.check_own()
    ranks.check_stages(num_stages)


@settings(max_examples=60, deadline=None)
@given(packs(), st.integers(1, 4))
def test_positions_and_padding(pack, cp_size):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    position = np.concatenate([np.arange(length) for length in padded] or [np.arange(0)])
    is_pad = position >= np.repeat(lens, padded)
    for rank in range(cp_size):
        layout = build_layout(plan, rank)
        index = layout.kv_index.numpy()
        assert layout.positions.tolist() == position[index].tolist()
        if lens == padded:
            assert layout.kv_padding is None
            assert layout.query_padding is None
            continue
        assert layout.kv_padding.tolist() == is_pad[index].tolist()
        if plan.is_self_attention:
            assert layout.query_padding.tolist() == is_pad[index].tolist()
        else:
            assert layout.query_padding is None


def test_own_blocks_of_anchors():
    plan = make_plan([9, 9], 2, queries=Anchors(((0, 3, 9), (5,)), 3), query_rows=[9, 3])
    first, second = (build_layout(plan, rank).block for rank in range(2))
    assert first.begin.tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert first.end.tolist() == [3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert second.end.tolist() == [3, 3, 3]
    assert build_layout(make_plan([9], 2, queries=Suffix(3)), 0).block is None
    assert build_layout(make_plan([9], 2), 0).block is None


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    names = getattr(value, "__dataclass_fields__", ())
    moving = [name for name in names if not name.endswith("_on_host")]
    return [tensor for name in moving for tensor in tensors_of(getattr(value, name))]


@pytest.mark.parametrize("queries", [Causal(), Window(4), Anchors(((3,), (5, 7)), 2)])
def test_to_moves_every_tensor_and_changes_nothing_else(queries):
    layout = build_layout(
        make_plan([9, 8], 3, queries=queries, padded_lens=[10, 10], block_size=2), 1, num_stages=2
    )
    moved = layout.to("meta")
    assert len(tensors_of(moved)) == len(tensors_of(layout)) > 10
    assert all(tensor.is_meta for tensor in tensors_of(moved))
    assert not any(tensor.is_meta for tensor in tensors_of(layout))
    assert moved.own.begin_on_host is layout.own.begin_on_host
    assert moved.own.end_on_host is layout.own.end_on_host
    assert [tensor.shape for tensor in tensors_of(moved)] == [
        tensor.shape for tensor in tensors_of(layout)
    ]
    assert (moved.fingerprint, moved.cp_rank) == (layout.fingerprint, 1)
    assert [stage.counts.tolist() for stage in moved.stages] == [
        stage.counts.tolist() for stage in layout.stages
    ]
    same = layout.to(torch.device("cpu"))
    assert all(map(torch.equal, tensors_of(same), tensors_of(layout)))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ValueError, match=rf"cp_rank={rank} must lie in \[0, 2\)"):
        build_layout(make_plan([8], 2), rank)
