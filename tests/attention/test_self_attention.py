"""Self-attention over simulated ranks against dense fp64: out, lse, dq, dk, dv, each apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.plan import Causal, Full, Prefix, Window, make_plan
from tests.packs import packs, query_specs
from tests.ranks import Heads, assert_outputs, dense, random_inputs, run_simulated

DOCS = [5, 1, 0, 30, 28, 61]  # document edges fall inside blocks and on them


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("queries", [Causal(), Window(9), Full()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_equals_dense_attention(cp_size, queries, dtype, route):
    plan = make_plan(DOCS, cp_size, queries=queries, block_size=16, route=route)
    inputs = random_inputs(plan, Heads(), dtype, seed=1)
    expected = dense(plan, inputs)
    for num_stages in sorted({1, 2, cp_size}):
        config = SplitKVConfig(num_stages=num_stages)
        assert_outputs(run_simulated(plan, inputs, config), expected, dtype)


@settings(max_examples=60, deadline=None)
@given(
    packs("cwfp"), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans(),
    st.sampled_from(ROUTES),
)  # fmt: skip
def test_any_pack(pack, cp_size, block_size, num_stages, keep_queries, route):
    lens, padded, queries = pack
    if isinstance(queries, Prefix):
        route = "queries"
    plan = make_plan(
        lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size, route=route
    )
    inputs = random_inputs(plan, Heads(q=4, kv=2, dim_qk=8, dim_v=4), has_dlse=True, has_sink=True)
    config = SplitKVConfig(num_stages=num_stages, keep_queries=keep_queries)
    assert_outputs(run_simulated(plan, inputs, config), dense(plan, inputs))


# A1, at a size for two cores: lengths that divide by nothing, no padding asked of the caller.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_lengths_that_do_not_divide(dtype, route):
    plan = make_plan([1, 7, 1024, 3], 4, route=route)
    inputs = random_inputs(plan, Heads(q=4, kv=1, dim_qk=64, dim_v=64), dtype, seed=1)
    assert sum(plan.tokens) == 1035
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs), dtype)


# A20 and its kin: head geometry that head-parallel schemes trip over.
@pytest.mark.parametrize(
    "heads",
    [
        Heads(q=4, kv=4, dim_qk=16, dim_v=16),
        Heads(q=6, kv=2, dim_qk=16, dim_v=16),  # groups of three
        Heads(q=10, kv=2, dim_qk=16, dim_v=16),  # groups of five
        Heads(q=8, kv=1, dim_qk=16, dim_v=16),  # one KV head, four ranks
        Heads(q=1, kv=1, dim_qk=16, dim_v=16),
        Heads(q=2, kv=2, dim_qk=192, dim_v=128),  # latent attention
        Heads(q=2, kv=1, dim_qk=40, dim_v=72),
        Heads(q=3, kv=1, dim_qk=5, dim_v=3),  # rows that are no multiple of 16 bytes
        Heads(q=2, kv=2, dim_qk=1, dim_v=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_head_geometry(heads, dtype, route):
    plan = make_plan([33, 1, 17], 4, block_size=4, route=route)
    inputs = random_inputs(plan, heads, dtype, seed=20, has_dlse=True)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs), dtype)


# A19: what sharding itself produces.
@pytest.mark.parametrize(
    "docs",
    [
        [],
        [0],
        [0, 0, 0],
        [1],
        [0, 1, 0, 0, 1, 5, 0],
        [1] * 17,
        [64, 64],
        [63, 1, 64],
        [65, 0, 63],
        [127],
    ],
    ids=str,
)
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_short_and_empty_documents(docs, cp_size, route):
    plan = make_plan(docs, cp_size, block_size=16, route=route)
    inputs = random_inputs(plan, Heads(), seed=19, has_sink=True, has_dlse=True)
    got = run_simulated(plan, inputs)
    assert got.out.shape == inputs.dout.shape
    assert_outputs(got, dense(plan, inputs))


# A10: more ranks than tokens.
@pytest.mark.parametrize("block_size", [1, 128])
@pytest.mark.parametrize("num_stages", [1, 3, 8])
@pytest.mark.parametrize("route", ROUTES)
def test_fewer_tokens_than_ranks(block_size, num_stages, route):
    plan = make_plan([5], 8, block_size=block_size, route=route)
    assert plan.tokens == (1, 1, 1, 1, 1, 0, 0, 0)
    inputs = random_inputs(plan, Heads(), seed=10)
    got = run_simulated(plan, inputs, SplitKVConfig(num_stages=num_stages))
    assert_outputs(got, dense(plan, inputs))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_layers_with_another_mask_share_the_placement(cp_size):
    """Models that mix window and full layers: one plan, one layout for each kind of layer."""
    plan = make_plan(DOCS, cp_size, block_size=16)
    inputs = random_inputs(plan, Heads(), seed=5)
    for queries in (Window(4), Window(1), Full(), Causal()):
        got = run_simulated(plan, inputs, SplitKVConfig(num_stages=2), queries)
        assert_outputs(got, dense(plan, inputs, queries))


@settings(max_examples=30, deadline=None)
@given(packs("cwfp"), st.integers(2, 4), st.data())
def test_any_other_mask_over_any_placement(pack, cp_size, data):
    lens, padded, queries = pack
    other = data.draw(query_specs(lens, "cwfp"))
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=3)
    inputs = random_inputs(plan, Heads(q=2, kv=1, dim_qk=8, dim_v=4))
    assert_outputs(run_simulated(plan, inputs, queries=other), dense(plan, inputs, other))


@pytest.mark.parametrize("softmax_scale", [0.0, 0.3, 2.0, -0.5])
@pytest.mark.parametrize("route", ROUTES)
def test_softmax_scale(softmax_scale, route):
    plan = make_plan([20, 13], 3, block_size=4, route=route)
    inputs = random_inputs(plan, Heads(), seed=6, softmax_scale=softmax_scale)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


@pytest.mark.parametrize("used", ["out", "lse", "both"])
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_of_out_of_lse_and_of_both(used, cp_size, route):
    plan = make_plan([20, 13, 1], cp_size, block_size=4, route=route)
    inputs = random_inputs(plan, Heads(), seed=7, has_dlse=used != "out", has_dout=used != "lse")
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


# A17 at a small size: returned partials are fp32, so more ranks add no error.
def test_error_does_not_grow_with_ranks():
    errors = []
    for cp_size in (1, 8):
        plan = make_plan([512], cp_size, block_size=16)
        inputs = random_inputs(plan, Heads(q=2, kv=1, dim_qk=64, dim_v=64), torch.bfloat16, seed=17)
        got, expected = run_simulated(plan, inputs), dense(plan, inputs)
        errors.append([
            float((getattr(got, name).double() - getattr(expected, name)).norm())
            for name in ("out", "dq", "dk", "dv")
        ])  # fmt: skip
    for at_one_rank, at_eight in zip(*errors, strict=True):
        assert at_eight <= 1.25 * at_one_rank
