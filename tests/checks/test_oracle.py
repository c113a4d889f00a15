"""The oracle that ships, against the one of the tests and by hand."""

import pytest
import torch
from hypothesis import given, settings

from megatron_splitkv.checks import oracle
from megatron_splitkv.plan import Anchors, Causal, is_self_attention, make_plan
from tests import oracle as tests_oracle
from tests.packs import block_mask, dense_mask, packs, plan_mask
from tests.ranks import Heads, random_inputs


@settings(max_examples=60, deadline=None)
@given(packs("cwfpsa"))
def test_masks_are_those_of_the_definitions(pack):
    lens, _, queries = pack
    expected = torch.from_numpy(dense_mask(queries, lens))
    assert torch.equal(oracle.document_mask(queries, lens), expected)
    assert expected.shape[1] == sum(lens)
    assert not is_self_attention(queries) or expected.shape[0] == sum(lens)


def test_own_blocks():
    plan = make_plan([9], 1, queries=Anchors(((3, 5),), 2))
    assert torch.equal(oracle.own_block_mask(4, 2), torch.from_numpy(block_mask(plan)))


def test_results_equal_autograd():
    plan = make_plan([20, 0, 1, 13], 1, queries=Causal())
    inputs = random_inputs(plan, Heads(q=4, kv=2, dim_qk=8, dim_v=6), seed=3)
    mask = torch.from_numpy(plan_mask(plan))
    mask[5] = False  # a row that sees nothing
    got = oracle.dense_attention(inputs.q, inputs.k, inputs.v, inputs.dout, mask, softmax_scale=0.3)
    due = tests_oracle.attend(
        inputs.q, inputs.k, inputs.v, mask, softmax_scale=0.3, dout=inputs.dout
    )
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(due, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [lambda x: x * torch.nan, lambda x: x.masked_fill(x > 0, torch.inf), lambda x: x[:-1]],
    ids=["nan", "inf", "shape"],
)
def test_what_is_no_number_is_an_infinite_error(change):
    due = torch.randn(5, 3)
    assert oracle.error_of(change(due.clone()), due).rel_l2 == float("inf")


def test_one_wrong_row_is_seen_by_row_and_hardly_by_norm():
    due = torch.randn(1000, 4, 8, generator=torch.Generator().manual_seed(0))
    got = due.clone()
    got[7, 2] *= 1.5
    error = oracle.error_of(got, due)
    assert error.rel_l2 < 0.02 < 0.2 < error.worst_row


def test_lse_differs_in_where_it_is_empty():
    due = torch.tensor([0.0, -torch.inf])
    assert oracle.lse_error(due, due) == 0.0
    assert oracle.lse_error(torch.tensor([-torch.inf, 0.0]), due) == float("inf")
