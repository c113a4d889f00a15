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
from megatron_splitkv.plan.exchange import MIN_STAGE_ROWS
from tests.packs import owner_of_rows, owner_of_tokens, packs, plan_mask, query_specs


def members(ranges: np.ndarray, size: int) -> np.ndarray:
    """`[size]` bool; asserts that the ranges are sorted, disjoint and not empty."""
    assert ranges.dtype == np.int64
    flat = ranges.flatten().tolist()
    assert flat == sorted(flat)
    assert all(begin < end for begin, end in ranges.tolist())
    is_member = np.zeros(size, dtype=bool)
    for begin, end in ranges.tolist():
        is_member[begin:end] = True
    return is_member


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
            ranges = exchange.ranges(source, destination)
            np.testing.assert_array_equal(members(ranges, num_rows), travels)


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
    assert plan_exchange(make_plan([512], 2, queries=Full(), block_size=1)).is_all_gather(3), (
        "two ranks have one stage at most"
    )
    assert not plan_exchange(make_plan([512], 1, queries=Full())).is_all_gather(1)
    causal = plan_exchange(make_plan([512], 4, block_size=64))
    assert not causal.is_all_gather(1)
    assert causal.sent(1).sum() < 3 * 512
    sparse = plan_exchange(make_plan([512], 4, queries=Window(3), block_size=64))
    assert sparse.sent(1).sum() < 64


def test_ranks_are_parted_before_rows_are_cut():
    rows = 3 * MIN_STAGE_ROWS
    of_two = plan_exchange(make_plan([2 * rows], 2, queries=Full(), block_size=64))
    assert [of_two.cuts(bound) for bound in (1, 2, 3, 9)] == [(1, 1), (1, 2), (1, 3), (1, 3)]
    of_four = plan_exchange(make_plan([4 * rows], 4, queries=Full(), block_size=64))
    assert [of_four.cuts(bound) for bound in (2, 3, 5, 6, 99)] == [
        (2, 1), (3, 1), (3, 1), (3, 2), (3, 3),
    ]  # fmt: skip
    # By default a stage brings half of the rows that a rank owns, or the least that are cut off.
    assert plan_exchange(make_plan([8 * rows], 2, queries=Full(), block_size=64)).cuts(None) == (
        1,
        2,
    )
    assert of_four.cuts(None) == (3, 2)
    assert plan_exchange(make_plan([64], 4, queries=Full())).cuts(None) == (1, 1)
    assert [of_four.num_exchanges(bound) for bound in (2, 6)] == [2, 6]
    assert plan_exchange(make_plan([rows], 1)).num_exchanges(4) == 0


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
