"""Cases with answers known by hand: structure, values, infinities, padding, sinks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Full, Window, make_plan
from tests.packs import owner_of_tokens, pad_rows, plan_mask
from tests.ranks import Heads, assert_outputs, dense, random_inputs, run_simulated


# A2: which value reaches which row, by gradients that are exactly zero or not.
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize(
    ("queries", "num_pairs"), [(Causal(), 887), (Window(3), 181), (Full(), 1710)]
)
def test_influence_is_exactly_the_mask(cp_size, queries, num_pairs):
    plan = make_plan([5, 1, 30, 28], cp_size, queries=queries, block_size=16)
    inputs = random_inputs(plan, Heads(q=2, kv=2, dim_qk=64, dim_v=64), seed=2)
    reaches = torch.zeros(64, 64, dtype=torch.bool)
    for row in range(64):
        one_row = torch.zeros_like(inputs.dout)
        one_row[row] = 1.0
        got = run_simulated(plan, replace(inputs, dout=one_row))
        reaches[row] = (got.dv != 0).any(-1).any(-1)
        assert ((got.dv != 0).all(-1).all(-1) == reaches[row]).all()
        assert (got.dq.abs().amax((1, 2)) > 0).nonzero().flatten().tolist() in ([row], [])
    assert np.array_equal(reaches.numpy(), plan_mask(plan))
    assert reaches.sum() == num_pairs


# A3: no token is lost to floor division.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uniform_attention_over_seven_tokens(dtype):
    plan = make_plan([7], 2, block_size=64, tolerance=1.0)  # [0, 4) and [4, 7): merges exactly
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=16, dim_v=16), dtype)
    index = torch.arange(7.0)
    inputs = replace(
        inputs,
        q=torch.zeros_like(inputs.q),
        v=index.to(dtype)[:, None, None].expand_as(inputs.v).clone(),
        dout=torch.ones_like(inputs.dout),
    )
    got = run_simulated(plan, inputs)
    assert torch.equal(got.out.float(), (index / 2)[:, None, None].expand_as(inputs.v))
    assert got.lse[6].item() == pytest.approx(1.945910, abs=1e-6)
    expected_dv = torch.tensor([sum(1 / (row + 1) for row in range(j, 7)) for j in range(7)])
    torch.testing.assert_close(got.dv[:, 0, 0].float(), expected_dv, atol=1e-2, rtol=0)
    assert got.dv[6].float().mean().item() == pytest.approx(0.142857, abs=1e-3)


# A6: one value moves the outputs of every rank.
def test_a_remote_value_reaches_every_rank():
    plan = make_plan([4096], 4)
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=16, dim_v=1), seed=6)
    moved = inputs.v.clone()
    moved[0] += 256
    before, after = run_simulated(plan, inputs), run_simulated(plan, replace(inputs, v=moved))
    change = (after.out - before.out)[:, 0, 0].double()
    weight = torch.exp((inputs.q.double() @ inputs.k[0, 0].double())[:, 0] / 4 - dense_lse(inputs))
    torch.testing.assert_close(change, 256 * weight, rtol=1e-3, atol=1e-4)
    owner = owner_of_tokens(plan)
    for rank in range(4):
        assert (change[torch.from_numpy(owner == rank)] != 0).double().mean() >= 0.99


def dense_lse(inputs) -> torch.Tensor:
    scores = inputs.q[:, 0].double() @ inputs.k[:, 0].double().T / 4
    return scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).logsumexp(1)


# A9: partials far apart, empty, and alone.
@pytest.mark.parametrize("far", [200.0, -1e5, 1e5])
@pytest.mark.parametrize("cp_size", [2, 8])
def test_partials_with_far_apart_lse(far, cp_size):
    """Half of the keys have logit 0 and value 1, half have logit `far` and value 3."""
    plan = make_plan([16], cp_size, queries=Full(), block_size=1)
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=1, dim_v=2), softmax_scale=1.0)
    is_far = torch.arange(16) % 2 == 1
    inputs = replace(
        inputs,
        q=torch.ones_like(inputs.q),
        k=torch.where(is_far, far, 0.0)[:, None, None],
        v=torch.where(is_far, 3.0, 1.0)[:, None, None].expand_as(inputs.v).clone(),
    )
    got, expected = run_simulated(plan, inputs), dense(plan, inputs)
    value = 3.0 if far > 0 else 1.0
    torch.testing.assert_close(got.out, torch.full_like(got.out, value))
    top = max(far, 0.0) + math.log(8)
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, top), rtol=1e-6, atol=1e-5)
    # dq is a sum over keys as large as `far` that cancels: rounding of that size stays.
    assert got.dq.abs().max() <= 1e-6 * abs(far)
    assert_outputs(replace(got, dq=expected.dq), expected)


def test_all_partials_far_below_zero():
    plan = make_plan([8], 4, queries=Full(), block_size=1)
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=1, dim_v=2), softmax_scale=1.0)
    inputs = replace(
        inputs,
        q=torch.ones_like(inputs.q),
        k=torch.full_like(inputs.k, -1e5),
        v=torch.where(torch.arange(8) % 2 == 1, 3.0, 1.0)[:, None, None].expand(8, 1, 2).clone(),
    )
    got = run_simulated(plan, inputs, SplitKVConfig(num_stages=1))
    torch.testing.assert_close(got.out, torch.full_like(got.out, 2.0))
    torch.testing.assert_close(
        got.lse, torch.full_like(got.lse, -1e5 + math.log(8)), rtol=1e-7, atol=0.01
    )


def test_the_only_partial_that_sees_a_key_is_taken_bitwise():
    """Rows whose one visible key is their own, on some rank: out is that value, exactly."""
    plan = make_plan([23], 8, queries=Window(1), block_size=1)
    inputs = random_inputs(plan, Heads(q=2, kv=2), seed=9)
    for queries in (Window(1), None):
        got = run_simulated(plan, inputs, SplitKVConfig(num_stages=3), queries)
        assert torch.equal(got.out, inputs.v)
        torch.testing.assert_close(got.dv, inputs.dout)
    # The keys of a document on one rank, the anchors' rows on another.
    anchors = Anchors(((0, 6),), 4)
    plan = make_plan([6], 8, queries=anchors, query_rows=[0, 0, 0, 0, 0, 0, 4, 4], block_size=1)
    inputs = random_inputs(plan, Heads(), seed=9)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


# A11: padding inside the pack, filled with NaN.
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("queries", [Causal(), Window(6), Full()], ids=str)
@pytest.mark.parametrize("has_extras", [False, True])
def test_padding_full_of_nan_reaches_nothing(cp_size, queries, has_extras):
    docs, padded = [10, 20], [32, 32]
    plan = make_plan(docs, cp_size, queries=queries, padded_lens=padded, block_size=8)
    kwargs = {"has_sink": has_extras, "has_dlse": has_extras}
    clean = random_inputs(plan, Heads(), seed=11, **kwargs)
    is_pad = torch.from_numpy(pad_rows(plan))
    dirty = {
        name: getattr(clean, name).clone()
        for name in ("q", "k", "v", "dout", *(["dlse"] if has_extras else []))
    }
    for tensor in dirty.values():
        tensor[is_pad] = torch.nan
    got = run_simulated(plan, replace(clean, **dirty))
    assert_outputs(got, dense(plan, clean))
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name)[is_pad] == 0).all(), name
    unpadded = make_plan(docs, 1, queries=queries)
    kept = {name: getattr(clean, name)[~is_pad] for name in dirty}
    expected = dense(unpadded, replace(clean, **kept))
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(got, name)[~is_pad].double(), getattr(expected, name), rtol=1e-4, atol=1e-5
        )


def test_padded_context_full_of_nan_reaches_nothing():
    anchors = Anchors(((0, 10), (7,)), 2)
    plan = make_plan([10, 20], 3, queries=anchors, padded_lens=[16, 32], block_size=4)
    clean = random_inputs(plan, Heads(), seed=11, has_dlse=True)
    is_pad = torch.zeros(48, dtype=torch.bool)
    is_pad[10:16] = is_pad[36:] = True
    k, v = clean.k.clone(), clean.v.clone()
    k[is_pad] = v[is_pad] = torch.nan
    got = run_simulated(plan, replace(clean, k=k, v=v))
    assert_outputs(got, dense(plan, clean))
    assert (got.dk[is_pad] == 0).all()
    assert (got.dv[is_pad] == 0).all()


# A21a: a sink counts once, not once a rank.
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_a_sink_counts_once(cp_size):
    plan = make_plan([8], cp_size, block_size=1)
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=4, dim_v=1))
    one_row = torch.zeros_like(inputs.dout)
    one_row[7] = 1.0
    inputs = replace(
        inputs, q=torch.zeros_like(inputs.q), v=torch.ones_like(inputs.v), dout=one_row,
        sink=torch.zeros(1),
    )  # fmt: skip
    got = run_simulated(plan, inputs)
    assert got.out[7].item() == pytest.approx(8 / 9, abs=1e-6)
    assert got.lse[7].item() == pytest.approx(math.log(9), abs=1e-6)
    assert got.dsink.item() == pytest.approx(-0.098765, abs=1e-6)


@pytest.mark.parametrize("cp_size", [1, 3])
def test_sinks_of_any_size_differ_by_head(cp_size):
    plan = make_plan([9, 0, 4], cp_size, block_size=2)
    inputs = random_inputs(plan, Heads(), seed=21, has_dlse=True)
    sink = torch.tensor([-torch.inf, -80.0, 0.5, 90.0])
    inputs = replace(inputs, sink=sink)
    assert_outputs(run_simulated(plan, inputs), dense(plan, inputs))


def test_a_closed_sink_on_a_row_without_keys():
    """Neither key nor sink: out = 0, lse = -inf, no NaN anywhere."""
    padded = make_plan([3], 2, padded_lens=[6], block_size=1)
    inputs = random_inputs(padded, Heads(), seed=21, has_dlse=True)
    inputs = replace(inputs, sink=torch.full((4,), -torch.inf))
    got = run_simulated(padded, inputs)
    assert (got.lse[3:] == -torch.inf).all()
    assert_outputs(got, dense(padded, inputs))
