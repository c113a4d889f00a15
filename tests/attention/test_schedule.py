"""Order of work: microbatches in flight, repeated runs, two models, graphs kept alive."""

import gc
import weakref

import pytest
import torch

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Plan, Suffix, Window, make_plan
from tests.ranks import (
    Heads,
    Inputs,
    RankCall,
    assert_outputs,
    dense,
    join_ranks,
    random_inputs,
    run_simulated,
)

HEADS = Heads(q=4, kv=2, dim_qk=16, dim_v=8)


def run_in_order(order: str, jobs: list[tuple[Plan, Inputs]], config: SplitKVConfig) -> list[str]:
    """Runs F0 F1 B1 B0, say, on every rank; the fingerprint of each microbatch's results."""

    def body(transport):
        calls = [RankCall(plan, inputs, transport, config) for plan, inputs in jobs]
        for step in order.split():
            call = calls[int(step[1])]
            call.forward() if step[0] == "F" else call.backward()
        return [call.parts for call in calls]

    ranks = ThreadGroup(jobs[0][0].cp_size).run(body)
    return [
        join_ranks(plan, [parts[index] for parts in ranks]).fingerprint()
        for index, (plan, _) in enumerate(jobs)
    ]


# A8: the plan belongs to the microbatch.
@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"keep_queries": True}, {"num_stages": 1}], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_microbatches_in_flight_give_the_bits_of_isolated_runs(cp_size, options, route):
    config = SplitKVConfig(**options)
    jobs = []
    for seed, docs in enumerate(([300, 212], [17, 495])):
        plan = make_plan(docs, cp_size, block_size=64, route=route)
        jobs.append((plan, random_inputs(plan, HEADS, seed=seed, has_dlse=True)))
    alone = run_in_order("F0 B0 F1 B1", jobs, config)
    assert run_in_order("F0 F1 B0 B1", jobs, config) == alone
    assert run_in_order("F0 F1 B1 B0", jobs, config) == alone
    plan, inputs = jobs[1]
    assert run_simulated(plan, inputs, config).fingerprint() == alone[1]
    assert_outputs(run_simulated(plan, inputs, config), dense(plan, inputs))


def test_models_of_different_masks_do_not_disturb_each_other():
    docs = [30, 18]
    jobs = []
    for seed, queries in enumerate((Causal(), Anchors(((0, 30), (7,)), 4), Window(5), Suffix(9))):
        plan = make_plan(docs, 2, queries=queries, block_size=4)
        jobs.append((plan, random_inputs(plan, HEADS, seed=seed)))
    config = SplitKVConfig()
    alone = run_in_order("F0 B0 F1 B1 F2 B2 F3 B3", jobs, config)
    assert run_in_order("F0 F1 F2 F3 B2 B0 B3 B1", jobs, config) == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("partial_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("route", ROUTES)
def test_the_same_bits_every_time(dtype, partial_dtype, route):
    plan = make_plan([300, 1, 212], 4, block_size=32, route=route)
    inputs = random_inputs(plan, HEADS, dtype, has_sink=True, has_dlse=True)
    config = SplitKVConfig(num_stages=2, partial_dtype=partial_dtype)
    prints = {run_simulated(plan, inputs, config).fingerprint() for _ in range(5)}
    assert len(prints) == 1


@pytest.mark.parametrize("route", ROUTES)
def test_backward_twice_over_a_kept_graph(route):
    plan = make_plan([20, 13], 2, block_size=4, route=route)
    inputs = random_inputs(plan, HEADS, seed=3)
    for keep_queries in (False, True):

        def body(transport, keep_queries=keep_queries):
            config = SplitKVConfig(keep_queries=keep_queries)
            call = RankCall(plan, inputs, transport, config)
            call.forward()
            given = call.leaves[:3]
            first = torch.autograd.grad(call.out, given, call.upstream[0], retain_graph=True)
            second = torch.autograd.grad(call.out, given, call.upstream[0])
            return all(map(torch.equal, first, second))

        assert ThreadGroup(2).run(body) == [True, True]


@pytest.mark.parametrize("route", ROUTES)
def test_recompute_gives_the_same_bits(route):
    """Activation recompute runs the forward, its exchange included, again inside the backward."""
    plan = make_plan([20, 13], 2, block_size=4, route=route)
    inputs = random_inputs(plan, HEADS, seed=3)

    def body(transport, is_recomputed):
        call = RankCall(plan, inputs, transport, SplitKVConfig())
        q, k, v = call.leaves[:3]

        def attend(q, k, v):
            call.leaves[:3] = q, k, v
            call.forward()
            return call.out

        if is_recomputed:
            out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
        else:
            out = attend(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), call.upstream[0])
        return [out.detach(), *grads]

    group = ThreadGroup(2)
    plain = group.run(lambda transport: body(transport, False))
    again = group.run(lambda transport: body(transport, True))
    for mine, theirs in zip(plain, again, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("keep_queries", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_backward_frees_what_forward_kept(keep_queries, route):
    """Inputs are held by the graph alone: gone once it is gone."""
    plan = make_plan([64], 2, block_size=4, route=route)
    inputs = random_inputs(plan, HEADS)
    held: list[weakref.ref] = []

    def body(transport):
        call = RankCall(plan, inputs, transport, SplitKVConfig(keep_queries=keep_queries))
        held.extend(weakref.ref(leaf) for leaf in call.leaves[:3])
        call.forward()
        call.backward()

    ThreadGroup(2).run(body)
    gc.collect()
    assert [ref() for ref in held] == [None] * 6


@pytest.mark.parametrize("route", ROUTES)
def test_what_was_gathered_is_not_saved_unless_asked(route):
    plan = make_plan([256], 2, block_size=4, route=route)
    inputs = random_inputs(plan, HEADS)

    def body(transport, keep_queries):
        call = RankCall(plan, inputs, transport, SplitKVConfig(keep_queries=keep_queries))
        call.forward()
        return sum(rows.numel() for rows in call.out.grad_fn.kept)

    group = ThreadGroup(2)
    assert group.run(lambda transport: body(transport, False)) == [0, 0]
    assert all(count > 0 for count in group.run(lambda transport: body(transport, True)))
