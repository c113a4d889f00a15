"""Which route is chosen: by mask, by bytes of a token, and by what a rank would gather."""

import pytest

import megatron_splitkv
from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Prefix,
    Suffix,
    Window,
    choose_route,
    make_plan,
)
from megatron_splitkv.plan.report import AttentionShape


def choice(cp_size=8, queries=None, num_stages=None, **changes):
    heads = {"num_heads_q": 32, "num_heads_kv": 8, "head_dim_qk": 128, "head_dim_v": 128}
    shape = AttentionShape(**heads | changes, dtype="bf16")
    return choose_route(shape, cp_size, queries or Causal(), num_stages=num_stages)


@pytest.mark.parametrize("queries", [Causal(), Window(9), Full()], ids=str)
def test_keys_of_grouped_heads_travel(queries):
    assert choice(queries=queries) == "keys"


@pytest.mark.parametrize(
    "queries", [Prefix((3,)), Suffix(4), Anchors(((3,),), 2)], ids=["prefix", "suffix", "anchors"]
)
def test_queries_travel_where_the_mask_has_no_other_route(queries):
    assert choice(queries=queries) == "queries"
    with pytest.raises(ValueError, match=r"route='keys' is for causal, .* take route 'queries'"):
        make_plan([9], 2, queries=queries, route="keys")


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({"cp_size": 1}, "queries"),
        ({"num_heads_kv": 32}, "queries"),  # as many heads: 5 rows of queries against 6 of keys
        ({"num_heads_kv": 16, "cp_size": 2}, "keys"),
        # 640 elements for each query head, 768 for each KV head.
        ({"num_heads_q": 4, "num_heads_kv": 4, "cp_size": 2}, "queries"),
        ({"num_heads_q": 10, "num_heads_kv": 5, "cp_size": 2}, "keys"),
        ({"num_heads_q": 2, "num_heads_kv": 1, "head_dim_v": 512, "cp_size": 2}, "keys"),
    ],
)
def test_fewer_elements_travel(changes, route):
    assert choice(**changes) == route


@pytest.mark.parametrize(
    ("heads", "most_ranks"),
    [
        ((32, 8), 16),  # two groups of four heads: 16 times four are twice the 32 of a query
        ((32, 16), 8),  # two groups of eight
        ((32, 2), 64),  # two groups of one
        ((32, 1), 64),  # one group
        ((30, 5), 12),  # two does not divide five heads: one group, 60 of 60
        ((30, 6), 20),  # two groups of three, 60 of 60
    ],
)
def test_what_a_rank_gathers_is_no_larger_than_its_queries(heads, most_ranks):
    heads = dict(zip(("num_heads_q", "num_heads_kv"), heads, strict=True))
    assert choice(most_ranks, **heads) == "keys"
    assert choice(most_ranks + 1, **heads) == "queries"


@pytest.mark.parametrize(("num_stages", "most_ranks"), [(1, 8), (2, 16), (3, 16), (8, 64)])
def test_groups_that_are_asked_for_count(num_stages, most_ranks):
    """Of 8 KV heads a rank gathers 8, 4, 4 or 1 at a time."""
    assert choice(most_ranks, num_stages=num_stages) == "keys"
    assert choice(most_ranks + 1, num_stages=num_stages) == "queries"


def test_the_package_names_it():
    assert megatron_splitkv.choose_route is choose_route
