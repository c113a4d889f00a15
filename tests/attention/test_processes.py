"""The main cases over gloo, one process a rank: the rest of the folder simulates the ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_splitkv.comm import ProcessGroupTransport, check_same_plan
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Full, Plan, Queries, Suffix, Window, make_plan
from megatron_splitkv.plan.route import has_route
from tests.gloo import run_gloo, run_outcomes
from tests.ranks import (
    Heads,
    Inputs,
    RecordingTransport,
    assert_outputs,
    dense,
    join_ranks,
    random_inputs,
    run_rank,
    run_simulated,
)

DOCS = [5, 1, 0, 30, 28, 61]
HEADS = Heads(q=4, kv=2, dim_qk=16, dim_v=8)
ANCHORS = Anchors(((0, 5, 5), (1,), (), (7, 30), (0,), (60, 61)), 2)


def world() -> ProcessGroupTransport:
    torch.use_deterministic_algorithms(True)  # what `empty` returns is NaN
    return ProcessGroupTransport(group=dist.group.WORLD)


def attend(
    plan: Plan, inputs: Inputs, config: SplitKVConfig, queries: Queries | None = None
) -> list[Tensor | None]:
    """One rank's part; runs in its process."""
    return run_rank(plan, inputs, world(), config, queries)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "route"),
    [
        (Causal(), "queries"), (Causal(), "keys"), (Full(), "queries"),
        (Window(9), "keys"), (ANCHORS, "queries"), (Suffix(9), "queries"),
    ],
    ids=str,
)  # fmt: skip
def test_equals_dense_attention(size, dtype, queries, route):
    plan = make_plan(DOCS, size, queries=queries, block_size=8, route=route)
    inputs = random_inputs(plan, HEADS, dtype, seed=size, has_dlse=True)
    for num_stages in (1, 3):
        config = SplitKVConfig(num_stages=num_stages)
        got = join_ranks(plan, run_gloo(size, attend, plan, inputs, config))
        assert_outputs(got, dense(plan, inputs), dtype)
        assert got.fingerprint() == run_simulated(plan, inputs, config).fingerprint()


@pytest.mark.parametrize(
    "options",
    [{"keep_queries": True}, {"partial_dtype": "bf16"}, {"partial_dtype": "fp16"}],
    ids=str,
)
def test_options_give_the_bits_of_simulated_ranks(options):
    plan = make_plan(DOCS, 4, block_size=8)
    inputs = random_inputs(plan, HEADS, has_sink=True)
    config = SplitKVConfig(num_stages=2, **options)
    got = join_ranks(plan, run_gloo(4, attend, plan, inputs, config))
    assert got.fingerprint() == run_simulated(plan, inputs, config).fingerprint()


def test_window_layer_over_a_causal_plan_with_padding():
    plan = make_plan([10, 20], 3, padded_lens=[32, 32], block_size=8)
    inputs = random_inputs(plan, HEADS, has_dlse=True)
    parts = run_gloo(3, attend, plan, inputs, SplitKVConfig(), Window(4))
    assert_outputs(join_ranks(plan, parts), dense(plan, inputs, Window(4)))


# A10: three tokens on four ranks, and rows on a rank without keys.
@pytest.mark.parametrize("queries", [Causal(), Anchors(((0, 3),), 2)], ids=["causal", "anchors"])
def test_ranks_without_tokens(queries):
    query_rows = None if queries == Causal() else [0, 2, 0, 2]
    plan = make_plan([3], 4, queries=queries, block_size=64, query_rows=query_rows)
    inputs = random_inputs(plan, HEADS)
    parts = run_gloo(4, attend, plan, inputs, SplitKVConfig(), timeout_s=30.0)
    assert_outputs(join_ranks(plan, parts), dense(plan, inputs))


# A16: random packs, ranks without tokens now and then, the same collectives on every rank.
NUM_STEPS = 20


def random_step(step: int) -> tuple[Plan, Inputs, SplitKVConfig]:
    """The pack of a step: the same on every rank, because it follows from the step alone."""
    draw = random.Random(step)
    docs = [draw.randint(1, 2048 // 64) for _ in range(draw.randint(1, 64))]
    if step % 5 == 1:
        docs = [draw.randint(1, 512), draw.randint(0, 1024)]
    if step % 10 == 0:
        docs = [1] * draw.randint(1, 3)
    queries: Queries = draw.choice([Causal(), Causal(), Window(draw.randint(1, 64)), Full()])
    if step % 7 == 3:
        queries = Suffix(draw.randint(1, 64))
    block_size = draw.choice([None, 1, 16, 64])
    route = "keys" if step % 2 and has_route("keys", queries) else "queries"
    plan = make_plan(docs, 4, queries=queries, block_size=block_size, route=route)
    config = SplitKVConfig(num_stages=draw.randint(1, 4), keep_queries=draw.random() < 0.5)
    return plan, random_inputs(plan, Heads(q=4, kv=2, dim_qk=8, dim_v=8), seed=step), config


def random_steps() -> list[tuple[list[Tensor | None], list[tuple]]]:
    """Runs every step on one rank; its results and collectives."""
    done = []
    for step in range(NUM_STEPS):
        plan, inputs, config = random_step(step)
        transport = RecordingTransport(world())
        check_same_plan(plan.fingerprint, transport, torch.device("cpu"))
        done.append((run_rank(plan, inputs, transport, config), transport.calls))
    return done


def test_random_steps_run_the_same_collectives_on_every_rank():
    ranks = run_gloo(4, random_steps, timeout_s=90.0)
    num_without_tokens = 0
    for step in range(NUM_STEPS):
        plan, inputs, _ = random_step(step)
        num_without_tokens += 0 in plan.tokens
        parts, calls = zip(*(rank[step] for rank in ranks), strict=True)
        assert len({tuple(call[:2] for call in rank) for rank in calls}) == 1, f"step {step}"
        for together in zip(*calls, strict=True):
            if together[0][0] == "exchange":
                sent = torch.tensor([call[2] for call in together])
                received = torch.tensor([call[3] for call in together])
                assert torch.equal(sent, received.T), f"step {step}"
        assert_outputs(join_ranks(plan, parts), dense(plan, inputs))
    assert num_without_tokens >= 2


def attend_different_packs(packs: list[list[int]]) -> None:
    transport = world()
    plan = make_plan(packs[transport.rank], transport.size)
    check_same_plan(plan.fingerprint, transport, torch.device("cpu"))


def test_ranks_fed_different_documents_all_raise_the_same_error():
    outcomes = run_outcomes(3, attend_different_packs, [[9, 7], [9, 7], [7, 9]], timeout_s=30.0)
    messages = {outcome.error.rstrip().splitlines()[-1] for outcome in outcomes}
    assert len(messages) == 1
    assert "hold different plans" in messages.pop()
