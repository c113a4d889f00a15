"""What the planner refuses by name: counts beyond 2^61, too many ranks, what is no integer."""

import math
import re

import numpy as np
import pytest

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan import Anchors, Causal, Full, Suffix, Window, make_plan
from megatron_splitkv.plan.queries import build_model

INT64_MAX = (1 << 63) - 1
MAX_COUNT = (1 << 61) - 1
LONGEST = math.isqrt(MAX_COUNT)  # rows times keys of one document still fit
BLOCK = 1 << 20


@pytest.mark.parametrize("queries", [Causal(), Full(), Window(LONGEST), Suffix(LONGEST)])
def test_costs_are_exact_up_to_the_limit(queries):
    plan = make_plan([LONGEST], 4, queries=queries, block_size=BLOCK)
    pairs = LONGEST**2 if queries == Full() else LONGEST * (LONGEST + 1) // 2
    assert sum(plan.costs) == pairs
    assert min(plan.costs) > 0


def test_anchor_costs_are_exact_up_to_the_limit():
    anchors = Anchors(((1, 1 << 20),), (1 << 40) - 1)
    assert sum(make_plan([1 << 20], 4, queries=anchors).costs) == ((1 << 20) + 1) * ((1 << 40) - 1)


@pytest.mark.parametrize(
    ("lens", "queries"),
    [
        ([5_000_000_000], Causal()),
        ([LONGEST + 1], Causal()),
        ([LONGEST + 1], Full()),
        ([1 << 60], Window(8)),
        ([1 << 60], Suffix(8)),
        ([1 << 20], Anchors(((1, 2),), 1 << 40)),
        ([MAX_COUNT], Causal()),
    ],
)
def test_pairs_beyond_the_limit_are_refused(lens, queries):
    message = (
        f"document 0 of {lens[0]} tokens brings query rows times keys of the pack beyond 2^61; "
        "plan shorter documents or a smaller pack"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(lens, 4, queries=queries, block_size=BLOCK)


def test_pairs_of_all_documents_count():
    message = f"document 1 of {LONGEST} tokens brings query rows times keys of the pack beyond"
    with pytest.raises(ValueError, match=message):
        make_plan([LONGEST] * 2, 4, block_size=BLOCK)


@pytest.mark.parametrize(
    ("lens", "padded", "queries"),
    [
        ([0, 1], [MAX_COUNT, 1], Causal()),
        ([0, 1], [MAX_COUNT, 1], Anchors(((), ()), 1)),
        ([1, 1], [1, 1], Anchors(((0,), (0,)), MAX_COUNT)),
        ([1, 1], [1, 1], Anchors(((), (0, 0, 0)), MAX_COUNT)),
    ],
)
def test_streams_beyond_the_limit_are_refused(lens, padded, queries):
    message = "document 1 of 1 tokens brings the tokens or query rows of the pack beyond 2^61"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_model(queries, lens, padded)


def test_packs_of_many_blocks_are_planned():
    """Time goes with documents and ranks, not with blocks."""
    plan = make_plan([10**12], 8, queries=Suffix(8), block_size=64)
    assert sum(plan.tokens) == 10**12
    assert sum(plan.costs) == 8 * 10**12 - 28
    assert len(plan.runs) <= 16


@pytest.mark.parametrize("cp_size", [(1 << 12) + 1, 1 << 40])
def test_more_ranks_than_are_counted_are_refused(cp_size):
    message = f"cp_size={cp_size} must be at least 1 and at most 4096"
    with pytest.raises(ValueError, match=message):
        make_plan([9], cp_size)


def test_numbers_of_numpy_are_numbers():
    plan = make_plan(np.asarray([9, 7]), np.int64(2), block_size=np.int32(4))
    assert plan == make_plan([9, 7], 2, block_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"doc_lens": [9, 1.5]}, "doc_lens: length=1.5 must be an integer"),
        ({"doc_lens": [9.0]}, "doc_lens: length=9.0 must be an integer"),
        ({"doc_lens": ["9"]}, "doc_lens: length=9 must be an integer"),
        ({"doc_lens": [10**20]}, f"doc_lens: length={10**20} must fit into 64 bits"),
        ({"padded_lens": [9.5]}, "padded_lens: length=9.5 must be an integer"),
        ({"cp_size": 2.0}, "cp_size=2.0 must be an integer"),
        ({"cp_size": 0}, "cp_size=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"block_size": -64}, "block_size=-64 must be at least 1"),
        ({"block_size": 64.5}, "block_size=64.5 must be an integer"),
        ({"block_size": 1 << 63}, f"block_size={1 << 63} must fit into 64 bits"),
        ({"tolerance": -0.01}, "tolerance=-0.01 must be at least 0; 0.001 accepts 0.1 %"),
        ({"tolerance": math.nan}, "tolerance=nan must be at least 0"),
        (
            {"queries": Suffix(4), "query_rows": [2.5, 1.5]},
            "query_rows: count=2.5 must be an integer",
        ),
        ({"queries": Anchors(((1.5,),), 4)}, "anchor position=1.5 must be an integer"),
        ({"queries": Anchors(((1 << 64,),), 4)}, f"anchor position={1 << 64} must fit into"),
    ],
)
def test_arguments_that_are_no_numbers_of_the_planner(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(**({"doc_lens": [9], "cp_size": 2} | arguments))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(1 << 63), f"window size={1 << 63} must fit into 64 bits"),
        (lambda: Window(2.5), "window size=2.5 must be an integer"),
        (lambda: Suffix(10**20), f"suffix num_rows={10**20} must fit into 64 bits"),
        (lambda: Anchors((), 10**20), f"rows_per_anchor={10**20} must fit into 64 bits"),
    ],
)
def test_specs_that_are_no_numbers_of_the_planner(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_the_model_says_what_its_callers_use():
    found = {name for name in vars(_planner.QueryModel) if not name.startswith("_")}
    assert found == {"num_tokens", "num_rows", "row_intervals", "pairs_in"}
