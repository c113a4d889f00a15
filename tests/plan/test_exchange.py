"""Which rows travel: needed rows, counts of both ends, and when one all_gather does."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Queries,
    RowExchange,
    Suffix,
    Window,
    make_plan,
    plan_exchange,
)
from megatron_splitkv.plan.exchange import DEALT_ROWS, MIN_STAGE_ROWS
from tests.packs import members, owner_of_rows, owner_of_tokens, packs, plan_mask, query_specs


def check_exchange(exchange: RowExchange, owner: np.ndarray, sees: np.ndarray) -> None:
    """Compares to row owners `[rows]` and to which rank's keys each row sees `[rows, ranks]`."""
    num_rows, cp_size = sees.shape
    for rank in range(cp_size):
        ranges = exchange.owned[rank]
        owned = np.zeros(num_rows, dtype=bool)
        for begin, end in ranges.tolist():
            assert not owned[begin:end].any()
            owned[begin:end] = True
        np.testing.assert_array_equal(owned, owner == rank)
        np.testing.assert_array_equal(members(exchange.needed[rank], num_rows), sees[:, rank])
    for source in range(cp_size):
        for destination in range(cp_size):
            travels = (owner == source) & sees[:, destination]
            assert exchange.counts[source, destination] == travels.sum()
    for num_stages in (1, 2, 5):
        check_stages(exchange, num_stages, owner, sees)


def check_stages(
    exchange: RowExchange, num_stages: int, owner: np.ndarray, sees: np.ndarray
) -> None:
    """Each row travels in one stage, to whom it must, and the counts are those of the ranges."""
    num_rows, cp_size = sees.shape
    stages = exchange.stages(num_stages)
    assert len(stages) == exchange.num_exchanges(num_stages) <= num_stages
    travels = np.zeros((len(stages), cp_size, cp_size, num_rows), dtype=bool)
    for index, stage in enumerate(stages):
        for source, destination in np.ndindex(cp_size, cp_size):
            rows = members(stage.ranges(source, destination), num_rows)
            assert stage.counts[source, destination] == rows.sum()
            travels[index, source, destination] = rows
    assert (travels.any(axis=(1, 2)).sum(axis=0) <= 1).all(), "a row in one stage"
    if not stages:
        return
    is_all = stages[0].is_all_gather
    for source, destination in np.ndindex(cp_size, cp_size):
        due = (owner == source) & (is_all | sees[:, destination])
        due &= (source != destination) | exchange.is_joint
        np.testing.assert_array_equal(travels[:, source, destination].any(axis=0), due)


@settings(max_examples=200, deadline=None)
@given(packs(), st.integers(1, 6), st.integers(1, 12))
@example(([8, 8], [8, 8], Causal()), 4, 1)
@example(([3, 5], [3, 5], Anchors(((0, 0), (0, 5)), 2)), 2, 2)
def test_rows_go_exactly_where_they_see_a_key(pack, cp_size, block_size):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size)
    mask, owner = plan_mask(plan), owner_of_tokens(plan)
    sees = np.stack([mask[:, owner == rank].any(axis=1) for rank in range(cp_size)], axis=1)
    check_exchange(plan_exchange(plan), owner_of_rows(plan), sees)


@settings(max_examples=100, deadline=None)
@given(packs("cwfp"), st.integers(1, 5), st.data())
def test_another_mask_over_the_same_placement(pack, cp_size, data):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    other: Queries = data.draw(query_specs(lens, "cwfp"))
    mask, owner = plan_mask(plan, other), owner_of_tokens(plan)
    sees = np.stack([mask[:, owner == rank].any(axis=1) for rank in range(cp_size)], axis=1)
    check_exchange(plan_exchange(plan, other), owner, sees)


@settings(max_examples=100, deadline=None)
@given(packs(), st.integers(1, 5), st.integers(1, 6))
def test_travelling_counts(pack, cp_size, num_stages):
    lens, padded, queries = pack
    exchange = plan_exchange(make_plan(lens, cp_size, queries=queries, padded_lens=padded))
    needed = exchange.travelling()
    assert (np.diag(needed) == 0).all()
    off_diagonal = ~np.eye(cp_size, dtype=bool)
    np.testing.assert_array_equal(needed[off_diagonal], exchange.counts[off_diagonal])
    wire = exchange.sent(num_stages)
    assert (wire >= needed).all()
    if not exchange.is_all_gather(num_stages):
        np.testing.assert_array_equal(wire, needed)


def test_documents_on_one_rank_cost_no_row():
    exchange = plan_exchange(make_plan([64] * 8, 4, block_size=64))
    assert exchange.sent(1).sum() == 0
    assert not exchange.is_all_gather(1)


def test_all_gather_when_everyone_needs_nearly_everything():
    full = plan_exchange(make_plan([512], 4, queries=Full(), block_size=1))
    assert full.is_all_gather(1)
    assert not full.is_all_gather(2), "stages send what is needed"
    assert not plan_exchange(make_plan([513], 4, queries=Full(), block_size=1)).is_all_gather(1), (
        "uneven shards"
    )
    assert plan_exchange(make_plan([512], 2, queries=Full(), block_size=1)).is_all_gather(1)
    assert not plan_exchange(make_plan([512], 1, queries=Full())).is_all_gather(1)
    causal = plan_exchange(make_plan([512], 4, block_size=64))
    assert not causal.is_all_gather(1)
    assert causal.sent(1).sum() < 3 * 512
    sparse = plan_exchange(make_plan([512], 4, queries=Window(3), block_size=64))
    assert sparse.sent(1).sum() < 64


def test_stages_bring_half_of_the_own_rows_by_default():
    rows = 4 * MIN_STAGE_ROWS
    full = {
        cp_size: plan_exchange(make_plan([cp_size * rows], cp_size, queries=Full(), block_size=64))
        for cp_size in (1, 2, 4)
    }
    assert [full[cp_size].num_exchanges(None) for cp_size in (1, 2, 4)] == [0, 2, 6]
    assert [full[4].num_exchanges(bound) for bound in (1, 2, 5, 99)] == [1, 2, 5, 99]
    # About MIN_STAGE_ROWS at least: up to half as many again are one stage.
    for length, due in ((2.8, 1), (3.2, 2), (16, 2)):
        plan = make_plan([int(length * MIN_STAGE_ROWS)], 2, queries=Full(), block_size=64)
        assert plan_exchange(plan).num_exchanges(None) == due
    small = plan_exchange(make_plan([64], 4, queries=Full()))
    assert [small.num_exchanges(bound) for bound in (None, 3, 99)] == [1, 3, 16]


def test_stages_are_even():
    """A causal document: later rows see more keys, and travel to more ranks."""
    exchange = plan_exchange(make_plan([32768], 4))
    stages = exchange.stages(4)
    counts = np.stack([stage.counts for stage in stages])
    assert (counts.sum(axis=0) == exchange.travelling()).all()
    received = counts.sum(axis=1)
    assert (received.max(axis=0) - received.min(axis=0) <= 3 * DEALT_ROWS).all()
    assert (received.max(axis=0) <= 1.1 * received.mean(axis=0)).all()
    for stage in stages:
        for ranges in stage.owned:
            assert (ranges % DEALT_ROWS == 0).all()


@pytest.mark.parametrize("num_stages", [3, 5, 7])
def test_stages_of_a_rank_differ_by_one_block_at_most(num_stages):
    stages = plan_exchange(make_plan([32768], 4)).stages(num_stages)
    rows = np.array([[np.diff(ranges).sum() for ranges in stage.owned] for stage in stages])
    assert rows.sum() == 32768
    assert (rows.max(axis=0) - rows.min(axis=0) == DEALT_ROWS).all()


def test_all_gather_counts_every_row():
    """Pads are needed by nobody and travel all the same: a collective has one size."""
    plan = make_plan([508], 4, queries=Full(), padded_lens=[512], block_size=1)
    exchange = plan_exchange(plan)
    assert exchange.is_all_gather(1)
    assert exchange.travelling().sum() == 3 * 508
    assert exchange.sent(1).sum() == 3 * 512


@pytest.mark.parametrize(
    ("made_for", "asked"),
    [(Causal(), Suffix(3)), (Suffix(3), Causal()), (Suffix(3), Suffix(4))],
)
def test_a_mask_with_other_query_rows_is_refused(made_for, asked):
    plan = make_plan([9, 9], 2, queries=made_for)
    message = f"queries={asked} has other query rows than the plan ({made_for}); make a plan"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_exchange(plan, asked)
