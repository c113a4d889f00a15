"""Context attention: few query rows, many keys, any rank owning any number of rows or none."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Plan, Suffix, Window, exchange, make_plan
from tests.packs import packs
from tests.ranks import (
    Heads,
    RecordingTransport,
    assert_outputs,
    dense,
    join_ranks,
    random_inputs,
    run_rank,
    run_simulated,
)

DOCS = [40, 0, 1, 23]
EDGES = Anchors(((0, 0, 39, 40, 40), (0,), (), (0, 11, 23)), 4)  # both ends, twice, none
NO_CONTEXT = Anchors(((0,), (), (0, 0), ()), 2)


@pytest.fixture
def garbage_in_new_memory():
    """New tensors start as NaN: what torch does in its deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(plan: Plan, dtype: torch.dtype = torch.float32, **options: object) -> None:
    inputs = random_inputs(plan, Heads(), dtype, seed=13, has_dlse=True)
    config = SplitKVConfig(**options)
    assert_outputs(run_simulated(plan, inputs, config), dense(plan, inputs), dtype)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("queries", [EDGES, NO_CONTEXT, Suffix(1), Suffix(9), Suffix(100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_dense_attention(cp_size, queries, dtype):
    for num_stages in sorted({1, 2, cp_size}):
        plan = make_plan(DOCS, cp_size, queries=queries, block_size=8)
        check(plan, dtype, num_stages=num_stages)


@pytest.mark.parametrize("keep_queries", [False, True])
@pytest.mark.parametrize(
    "query_rows", [(36, 0, 0, 0), (0, 0, 0, 36), (0, 20, 0, 16), (4, 4, 24, 4)], ids=str
)
def test_ragged_ownership(query_rows, keep_queries, garbage_in_new_memory):
    for num_stages in (1, 3):
        plan = make_plan(DOCS, 4, queries=EDGES, block_size=8, query_rows=query_rows)
        check(plan, num_stages=num_stages, keep_queries=keep_queries)
        plan = make_plan([40, 20], 4, queries=Suffix(18), block_size=8, query_rows=query_rows)
        check(plan, num_stages=num_stages, keep_queries=keep_queries)


@pytest.mark.parametrize("query_rows", [(8, 0, 0, 0), (0, 0, 4, 4), (2, 2, 2, 2)], ids=str)
def test_ranks_without_keys(query_rows):
    """Three keys on four ranks: one has rows and no key, or neither."""
    anchors = Anchors(((0, 1, 3, 3),), 2)
    plan = make_plan([3], 4, queries=anchors, query_rows=query_rows, block_size=1)
    assert plan.tokens == (1, 1, 1, 0)
    check(plan)
    check(make_plan([3], 4, queries=Suffix(2), query_rows=(0, 0, 0, 2), block_size=1))


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize(
    ("docs", "queries"),
    [
        ([], Suffix(3)),
        ([0, 0], Suffix(3)),
        ([9, 9], Anchors(((), ()), 16)),
        ([0, 0], Anchors(((0,), (0, 0)), 2)),
        ([], Anchors((), 2)),
    ],
    ids=str,
)
def test_no_rows_or_no_keys_at_all(cp_size, docs, queries):
    check(make_plan(docs, cp_size, queries=queries))


@settings(max_examples=60, deadline=None)
@given(packs("sa"), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.data())
def test_any_pack(pack, cp_size, block_size, num_stages, data):
    lens, padded, queries = pack
    arguments = {"queries": queries, "padded_lens": padded, "block_size": block_size}
    even = make_plan(lens, cp_size, **arguments)
    unit = queries.rows_per_anchor if isinstance(queries, Anchors) else 1
    num_units = sum(even.query_rows) // unit
    cuts = sorted(data.draw(st.integers(0, num_units)) for _ in range(cp_size - 1))
    query_rows = (np.diff([0, *cuts, num_units]) * unit).tolist()
    check(make_plan(lens, cp_size, query_rows=query_rows, **arguments), num_stages=num_stages)


def test_sink_and_own_block_join_once():
    plan = make_plan(DOCS, 3, queries=EDGES, block_size=8)
    inputs = random_inputs(plan, Heads(), seed=14, has_sink=True, has_dlse=True)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


def test_own_block_is_all_that_an_anchor_at_zero_sees():
    """With one row a block, the row is its own only key: out is its value."""
    plan = make_plan([6], 2, queries=Anchors(((0, 0, 0),), 1), block_size=1)
    inputs = random_inputs(plan, Heads(q=2, kv=2), seed=15)
    got = run_simulated(plan, inputs)
    assert torch.equal(got.out, inputs.block_v)
    assert (got.dk == 0).all()
    assert (got.dv == 0).all()


def test_keys_after_the_last_anchor_get_no_gradient():
    plan = make_plan([12], 3, queries=Anchors(((2, 7),), 2), block_size=2)
    inputs = random_inputs(plan, Heads(), seed=16)
    got = run_simulated(plan, inputs)
    assert (got.dv[:7] != 0).any(-1).any(-1).all()
    assert (got.dk[7:] == 0).all()
    assert (got.dv[7:] == 0).all()


@pytest.mark.parametrize("options", [{}, {"keep_queries": True, "partial_dtype": "fp16"}], ids=str)
@pytest.mark.parametrize("queries", [EDGES, Suffix(9), Causal(), Window(7)], ids=str)
@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "plain"])
def test_own_rows_are_done_with_those_of_the_others(has_sink, cp_size, queries, options):
    plan = make_plan(DOCS, cp_size, queries=queries, block_size=4)
    inputs = random_inputs(plan, Heads(), torch.bfloat16, has_sink=has_sink, has_dlse=True)
    with mock.patch.object(exchange, "JOINT_KEYS_PER_ROW", 0):
        got = run_simulated(plan, inputs, SplitKVConfig(**options))
    assert_outputs(got, dense(plan, inputs), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing_are_written_by_the_only_stage(dtype, monkeypatch):
    """Pads; memory for results is full of NaN before."""
    plan = make_plan([3, 9], 2, queries=Causal(), padded_lens=[8, 16], block_size=4)
    inputs = random_inputs(plan, Heads(), dtype)
    monkeypatch.setattr(exchange, "JOINT_KEYS_PER_ROW", 0)
    torch.use_deterministic_algorithms(True)  # which fills memory that is not written
    try:
        got = run_simulated(plan, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_outputs(got, dense(plan, inputs), dtype)
    assert (got.out[3:8] == 0).all() and (got.lse[3:8] == -torch.inf).all()
    assert (got.dq[3:8] == 0).all()


def test_few_rows_are_one_exchange_each_way():
    plan = make_plan([2048], 2, queries=Suffix(8), block_size=64)
    inputs = random_inputs(plan, Heads())

    def body(transport):
        recording = RecordingTransport(transport)
        return run_rank(plan, inputs, recording, SplitKVConfig()), len(recording.calls)

    parts, calls = zip(*ThreadGroup(2).run(body), strict=True)
    assert_outputs(join_ranks(plan, parts), dense(plan, inputs))
    assert calls == (4, 4), "out and back, forward and backward"
