"""Tokens of a rank: cutting a batch and putting it together again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.layout import build_layout, shard_rows, token_index, unshard_rows
from megatron_splitkv.layout.shard import expand_ranges
from megatron_splitkv.plan import make_plan
from tests.packs import owner_of_tokens, packs


def test_expand_ranges():
    ranges = np.array([[2, 4], [7, 7], [7, 9]])
    assert expand_ranges(ranges).tolist() == [2, 3, 7, 8]
    assert expand_ranges(np.empty((0, 2), dtype=np.int64)).tolist() == []
    assert expand_ranges(np.array([[3, 3]])).tolist() == []


@settings(max_examples=200, deadline=None)
@given(packs(), st.integers(1, 6), st.integers(1, 9))
def test_token_index_is_ascending_and_shards_come_back(pack, cp_size, block_size):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size)
    owner = owner_of_tokens(plan)
    stream = torch.arange(plan.num_tokens)
    shards = []
    for rank in range(cp_size):
        index = token_index(plan, rank)
        assert index.tolist() == np.flatnonzero(owner == rank).tolist()
        shards.append(shard_rows(stream, torch.from_numpy(index)))
    assert torch.equal(unshard_rows(shards, plan), stream)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension(dim):
    plan = make_plan([9, 1, 23], 4, block_size=2)
    shape = [3, 4, 5]
    shape[dim] = plan.num_tokens
    tensor = torch.randn(shape, dtype=torch.bfloat16)
    shards = [
        shard_rows(tensor, build_layout(plan, rank).kv_index, dim) for rank in range(plan.cp_size)
    ]
    assert [shard.shape[dim] for shard in shards] == list(plan.tokens)
    assert torch.equal(unshard_rows(shards, plan, dim), tensor)


def test_gradients_pass_through():
    plan = make_plan([9, 1, 23], 4, block_size=2)
    tensor = torch.randn(plan.num_tokens, 2, requires_grad=True)
    shards = [shard_rows(tensor, build_layout(plan, rank).kv_index) for rank in range(4)]
    weight = torch.randn(plan.num_tokens, 2)
    (unshard_rows(shards, plan) * weight).sum().backward()
    assert torch.equal(tensor.grad, weight)


def test_tokens_labels_and_positions_stay_together():
    """A12: shift the labels in stream order, then shard; positions restart in each document."""
    docs = [9, 1, 23]
    plan = make_plan(docs, 4, block_size=2)
    tokens = torch.arange(plan.num_tokens)
    last = torch.tensor(docs).cumsum(0) - 1
    labels = (tokens + 1).index_fill(0, last, -100)
    position_in_doc = torch.cat([torch.arange(length) for length in docs])
    found, shards = [], []
    for rank in range(4):
        layout = build_layout(plan, rank)
        shard = [shard_rows(tensor, layout.kv_index) for tensor in (tokens, labels)]
        shards.append(shard[0])
        found += zip(*(x.tolist() for x in (*shard, layout.positions)), strict=True)
    expected = list(zip(*(x.tolist() for x in (tokens, labels, position_in_doc)), strict=True))
    assert sorted(found) == sorted(expected)
    targets = [(token, label) for token, label, _ in found if label != -100]
    assert len(targets) == sum(docs) - len(docs), "a last token has no target, nor a lone one"
    assert all(label == token + 1 for token, label in targets)
    assert unshard_rows(shards, plan).tolist() == list(range(33))


def test_wrong_number_of_shards_is_refused():
    plan = make_plan([8], 4)
    with pytest.raises(ValueError, match="got 2 shards for a plan with cp_size=4"):
        unshard_rows([torch.zeros(2), torch.zeros(2)], plan)
