"""Who writes the gradients of the keys: one call in the dtype of the inputs, several in fp32."""

from unittest import mock

import pytest
import torch

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.ops import partial_attention_backward
from megatron_splitkv.plan import Anchors, Causal, Suffix, make_plan
from megatron_splitkv.routes import keys, queries
from tests.ranks import Heads, assert_outputs, dense, random_inputs, run_simulated

HEADS = Heads(q=4, kv=2, dim_qk=16, dim_v=8)
ONCE = False  # written, not added to
ANCHORS = Anchors(((0, 100, 128),), 4)


# Of one rank; rows few enough to come in one exchange; own rows, then those of the other rank; own
# rows, and own blocks, whose keys are the own rows' alone. Keys that travel: of documents on this
# rank alone, and of those on others too, whose sums the owner adds.
@pytest.mark.parametrize(
    ("cp_size", "mask", "route", "calls"),
    [
        (1, Causal(), queries, {("input", ONCE)}),
        (2, Suffix(4), queries, {("input", ONCE)}),
        (2, Causal(), queries, {("fp32", ONCE), ("fp32", not ONCE)}),
        (1, ANCHORS, queries, {("input", ONCE)}),
        (1, Causal(), keys, {("input", ONCE)}),
        (2, Causal(), keys, {("fp32", ONCE)}),
    ],
    ids=["alone", "joint", "staged", "blocks", "keys alone", "keys of several ranks"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_only_sums_over_calls_are_fp32(cp_size, mask, route, calls, dtype):
    name = "keys" if route is keys else "queries"
    plan = make_plan([512], cp_size, queries=mask, block_size=64, route=name)
    inputs = random_inputs(plan, HEADS, dtype, seed=3)
    names = {torch.float32: "fp32", dtype: "input"}
    seen = set()

    def spy(*args, accumulate, **options):
        dk, dv = args[8:]
        assert dk.dtype == dv.dtype
        seen.add((names[dk.dtype], accumulate))
        return partial_attention_backward(*args, accumulate=accumulate, **options)

    with mock.patch.object(route, "partial_attention_backward", spy):
        found = run_simulated(plan, inputs, SplitKVConfig(num_stages=1))
    assert seen == calls
    assert_outputs(found, dense(plan, inputs), dtype)
