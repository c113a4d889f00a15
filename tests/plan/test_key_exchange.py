"""Which keys travel: owned and needed ones against dense masks, and in how many groups of heads."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Plan,
    Prefix,
    Queries,
    Suffix,
    Window,
    make_plan,
    num_head_groups,
    plan_from_json,
    plan_key_exchange,
)
from tests.packs import members, owner_of_tokens, packs, plan_mask, query_specs


def check_keys(plan: Plan, queries: Queries | None = None) -> None:
    exchange = plan_key_exchange(plan, queries)
    owner, mask, ranks = owner_of_tokens(plan), plan_mask(plan, queries), range(plan.cp_size)
    document = np.repeat(np.arange(len(plan.doc_lens)), plan.padded_lens)
    on_ranks = [len({*owner[document == doc]}) for doc in range(len(plan.doc_lens))]
    is_shared = np.asarray(on_ranks) > 1
    is_shared &= np.asarray(plan.doc_lens) > 0  # not of pads alone
    np.testing.assert_array_equal(exchange.is_shared, is_shared)
    assert exchange.is_shared.dtype == bool
    in_shared = is_shared[document]
    owned = [(owner == rank) & in_shared for rank in ranks]
    needed = [mask[owner == rank].any(axis=0) & in_shared for rank in ranks]
    assert len(exchange.owned) == len(exchange.needed) == plan.cp_size
    for rank in ranks:
        found = members(exchange.owned[rank], plan.num_tokens)
        np.testing.assert_array_equal(found, owned[rank])
        found = members(exchange.needed[rank], plan.num_tokens)
        np.testing.assert_array_equal(found, needed[rank])
    assert exchange.counts.shape == exchange.travelling().shape == (plan.cp_size, plan.cp_size)
    for source, destination in np.ndindex(plan.cp_size, plan.cp_size):
        sent = owned[source] & needed[destination]
        found = members(exchange.ranges(source, destination), plan.num_tokens)
        np.testing.assert_array_equal(found, sent)
        assert exchange.counts[source, destination] == sent.sum()
        travels = 0 if source == destination else sent.sum()
        assert exchange.travelling()[source, destination] == travels


@settings(max_examples=150, deadline=None)
@given(packs("cwf"), st.integers(1, 6), st.integers(1, 9))
@example(([], [], Causal()), 3, 1)
@example(([64], [64], Full()), 4, 1)
@example(([5, 1], [9, 4], Causal()), 8, 1)
@example(([40], [40], Window(3)), 4, 1)
def test_keys_of_shared_documents_go_where_they_are_seen(pack, cp_size, block_size):
    lens, padded, queries = pack
    check_keys(
        make_plan(
            lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size, route="keys"
        )
    )


@settings(max_examples=100, deadline=None)
@given(packs("cwf"), st.integers(1, 5), st.integers(1, 5), st.data())
def test_another_mask_over_the_same_placement(pack, cp_size, block_size, data):
    """Also over one that was made for queries to travel."""
    lens, padded, queries = pack
    route = data.draw(st.sampled_from(["keys", "queries"]))
    plan = make_plan(
        lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size, route=route
    )
    check_keys(plan, data.draw(query_specs(lens, "cwf")))


def test_a_window_call_over_a_causal_plan():
    """Half of 64 tokens each, in runs of their own: a window of 3 sends two keys at each cut."""
    plan = make_plan([64], 2, block_size=16, route="keys")
    check_keys(plan, Window(3))
    causal, window = plan_key_exchange(plan), plan_key_exchange(plan, Window(3))
    owner = owner_of_tokens(plan)
    cuts = np.flatnonzero(np.diff(owner)) + 1
    assert window.travelling().sum() == 2 * len(cuts) > 0
    assert window.travelling().sum() < causal.travelling().sum()
    assert plan_key_exchange(plan, Causal()).counts.tolist() == causal.counts.tolist()


@settings(max_examples=150, deadline=None)
@given(packs("cwf"), st.integers(1, 6), st.integers(1, 9))
@example(([40], [43], Causal()), 3, 1)
def test_costs_are_the_pairs_of_own_rows(pack, cp_size, block_size):
    lens, padded, queries = pack
    options = {"queries": queries, "padded_lens": padded, "block_size": block_size}
    plan = make_plan(lens, cp_size, route="keys", **options)
    owner, mask = owner_of_tokens(plan), plan_mask(plan)
    assert plan.route == "keys"
    assert plan.costs == tuple(int(mask[owner == rank].sum()) for rank in range(cp_size))
    tokens, more = divmod(sum(padded), cp_size)
    assert plan.tokens == plan.query_rows == (tokens + 1,) * more + (tokens,) * (cp_size - more)
    by_queries = make_plan(lens, cp_size, **options)
    assert plan.costs == by_queries.costs
    assert plan.fingerprint != by_queries.fingerprint
    read = plan_from_json(plan.to_json())
    assert read == plan
    assert (read.route, read.costs) == ("keys", plan.costs)


def test_long_documents_are_balanced_by_their_rows():
    plan = make_plan([4096, 100, 900], 4, block_size=16, route="keys")
    assert max(plan.costs) <= 1.01 * sum(plan.costs) / 4
    whole = make_plan([64] * 8, 4, block_size=64, route="keys")
    exchange = plan_key_exchange(whole)
    assert not exchange.is_shared.any()
    assert exchange.counts.tolist() == [[0] * 4] * 4
    assert all(len(ranges) == 0 for ranges in (*exchange.owned, *exchange.needed))


@pytest.mark.parametrize(
    ("num_heads_kv", "num_heads_q", "num_rows", "num_stages", "num_groups"),
    [
        # Told: the most groups up to num_stages that divide the heads.
        (8, 32, 64, 1, 1),
        (8, 32, 64, 2, 2),
        (8, 32, 64, 3, 2),
        (8, 32, 64, 7, 4),
        (8, 32, 64, 8, 8),
        (8, 32, 64, 100, 8),
        (3, 6, 64, 2, 1),
        (6, 6, 64, 5, 3),
        (1, 8, 1 << 20, 4, 1),
        # Not told: two groups from 2 * 65536 query rows times heads on, never more.
        (8, 32, 4095, None, 1),
        (8, 32, 4096, None, 2),
        (8, 32, 1 << 20, None, 2),
        (4, 1, (1 << 17) - 1, None, 1),
        (4, 1, 1 << 17, None, 2),
        (3, 32, 1 << 20, None, 1),
        (1, 32, 1 << 20, None, 1),
        (8, 32, 0, None, 1),
    ],
)
def test_head_groups(num_heads_kv, num_heads_q, num_rows, num_stages, num_groups):
    assert num_head_groups(num_heads_kv, num_heads_q, num_rows, num_stages) == num_groups


@pytest.mark.parametrize(
    "queries", [Prefix((3,)), Suffix(4), Anchors(((3, 5),), 2)], ids=["prefix", "suffix", "anchors"]
)
def test_masks_without_this_route_are_refused(queries):
    message = (
        f"route='keys' is for causal, window and full self-attention, got {queries}; "
        "take route 'queries'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan([9], 2, queries=queries, route="keys")
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_key_exchange(make_plan([9], 2, route="keys"), queries)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_key_exchange(make_plan([9], 2, queries=queries))


@pytest.mark.parametrize("route", ["values", "", "Keys"])
def test_an_unknown_route_is_refused(route):
    message = f"route={route!r} is unknown; choose one of queries, keys"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan([9], 2, route=route)
