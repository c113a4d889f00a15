"""Several ranks on one GPU, in bf16: threads on streams of their own, and processes over gloo."""

import random
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_splitkv.comm import (
    Counts,
    PassingTransport,
    Pending,
    ThreadGroup,
    ThreadTransport,
    transport_of,
)
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Full, Plan, Queries, Suffix, Window, make_plan
from megatron_splitkv.plan.route import has_route
from tests.gloo import run_gloo
from tests.ranks import (
    Heads,
    Inputs,
    Outputs,
    RankCall,
    assert_outputs,
    dense,
    drift_of_random_steps,
    join_ranks,
    random_inputs,
    run_rank,
    run_simulated,
)
from tests.tolerances import CUDA_BACKWARD_BY_DTYPE, cuda_forward

pytestmark = pytest.mark.gpu

DOCS = [700, 1, 0, 130, 64, 1000]
HEADS = Heads(q=4, kv=2, dim_qk=128, dim_v=128)
ANCHORS = Anchors(((0, 300, 700), (1,), (), (7, 130), (0,), (999,)), 16)


def check(got: Outputs, expected: Outputs, dtype: torch.dtype = torch.bfloat16) -> None:
    gradient = CUDA_BACKWARD_BY_DTYPE[dtype]
    names = ("dq", "dk", "dv", "dblock_k", "dblock_v", "dsink")
    forward = cuda_forward(dtype, dtype)
    assert_outputs(got, expected, out=forward, **dict.fromkeys(names, gradient))


@cache
def known(queries: Queries) -> tuple[Inputs, Outputs]:
    """Inputs over the documents and what attention must give; the same for any number of ranks."""
    plan = make_plan(DOCS, 1, queries=queries)
    inputs = random_inputs(plan, HEADS, torch.bfloat16, seed=4, has_dlse=True)
    return inputs, dense(plan, inputs)


@pytest.mark.parametrize("partial_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("queries", [Causal(), Window(200), Full(), ANCHORS, Suffix(90)], ids=str)
def test_equals_dense_attention(queries, route, cp_size, partial_dtype):
    if not has_route(route, queries):
        pytest.skip("this mask has no such route")
    plan = make_plan(DOCS, cp_size, queries=queries, block_size=64, route=route)
    inputs, expected = known(queries)
    for num_stages in (1, 3):
        config = SplitKVConfig(num_stages=num_stages, partial_dtype=partial_dtype)
        check(run_simulated(plan, inputs, config, device="cuda"), expected)


@pytest.mark.parametrize("route", ROUTES)
def test_sink_padding_and_what_is_kept(route):
    plan = make_plan([700, 300], 4, padded_lens=[768, 320], block_size=64, route=route)
    inputs = random_inputs(plan, HEADS, torch.bfloat16, has_sink=True)
    config = SplitKVConfig(keep_queries=True)
    check(run_simulated(plan, inputs, config, device="cuda"), dense(plan, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("docs", [DOCS, [3000], [17] * 20], ids=["mixed", "long", "short"])
@pytest.mark.parametrize(
    "heads", [Heads(q=8, kv=2, dim_qk=128, dim_v=128), Heads(q=4, kv=4, dim_qk=64, dim_v=64)],
    ids=["grouped", "alike"],
)  # fmt: skip
def test_keys_of_other_heads_travel(heads, docs, dtype):
    """In groups of one, two or four KV heads; where all documents are whole, none travels."""
    plan = make_plan(docs, 4, block_size=64, route="keys")
    inputs = random_inputs(plan, heads, dtype, seed=6, has_dlse=True)
    expected = dense(plan, inputs)
    for config in (SplitKVConfig(), SplitKVConfig(num_stages=2, keep_queries=True)):
        check(run_simulated(plan, inputs, config, device="cuda"), expected, dtype)


# A8: microbatches in flight give the bits of isolated runs.
def test_microbatches_in_flight():
    jobs = [make_plan(docs, 2, block_size=64) for docs in ([300, 212], [17, 495])]
    jobs = [(plan, random_inputs(plan, HEADS, torch.bfloat16, seed=8)) for plan in jobs]

    def run_in_order(order: str) -> list[str]:
        def body(transport):
            calls = [RankCall(*job, transport, SplitKVConfig(), device="cuda") for job in jobs]
            for step in order.split():
                call = calls[int(step[1])]
                call.forward() if step[0] == "F" else call.backward()
            return [call.parts for call in calls]

        ranks = ThreadGroup(2, device="cuda").run(body)
        return [
            join_ranks(plan, [parts[index] for parts in ranks]).fingerprint()
            for index, (plan, _) in enumerate(jobs)
        ]

    alone = run_in_order("F0 B0 F1 B1")
    assert run_in_order("F0 F1 B0 B1") == alone
    assert run_in_order("F0 F1 B1 B0") == alone


@dataclass
class DelayedTransport(PassingTransport):
    """Puts random pauses of the GPU before and after every collective, on both of its streams."""

    inner: ThreadTransport
    draw: random.Random

    def pause(self, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(self.draw.randrange(8_000_000))  # up to 5 ms

    def started(self, pending: Pending) -> Pending:
        self.pause()

        def finish() -> Tensor:
            rows = pending.wait()
            self.pause()
            return rows

        return Pending(finish)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        self.pause()
        self.pause(self.inner.group.receiving_stream(self.rank))
        return self.started(self.inner.exchange(rows, counts))

    def all_gather(self, rows: Tensor) -> Pending:
        self.pause()
        self.pause(self.inner.group.receiving_stream(self.rank))
        return self.started(self.inner.all_gather(rows))


# A22: one hash, whatever the timing.
@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_the_same_bits_at_any_timing(is_delayed, route):
    plan = make_plan([3000, 1096], 4, route=route)
    inputs = random_inputs(plan, HEADS, torch.bfloat16, seed=22)
    config = SplitKVConfig(num_stages=3)
    expected = run_simulated(plan, inputs, config, device="cuda").fingerprint()
    group = ThreadGroup(4, device="cuda")
    for repeat in range(20):

        def body(transport, repeat=repeat):
            draw = random.Random(100 * repeat + transport.rank)
            wrapped = DelayedTransport(transport, draw) if is_delayed else transport
            return run_rank(plan, inputs, wrapped, config, device="cuda")

        assert join_ranks(plan, group.run(body)).fingerprint() == expected, f"run {repeat}"


# A17, at a length that the dense oracle takes.
def test_default_partials_keep_the_error_of_one_rank():
    errors = {"out": [], "dq": []}
    for cp_size in (1, 8):
        plan = make_plan([2048], cp_size, queries=Full(), block_size=64)
        inputs = random_inputs(plan, Heads(q=2, kv=1, dim_qk=128, dim_v=128), torch.bfloat16)
        got, expected = run_simulated(plan, inputs, device="cuda"), dense(plan, inputs)
        for name, found in errors.items():
            theirs = getattr(expected, name)
            found.append(float((getattr(got, name).double() - theirs).norm() / theirs.norm()))
    for name, (one, eight) in errors.items():
        assert eight <= 1.25 * one, f"{name}: {eight} at cp 8, {one} at cp 1"


# A24: no host sync in a layer, memory that falls with cp, and no drift.
@pytest.mark.parametrize("options", [{}, {"keep_queries": True}, {"num_stages": 1}], ids=str)
@pytest.mark.parametrize(("queries", "route"), [(ANCHORS, "queries"), (Causal(), "keys")], ids=str)
def test_layers_never_wait_for_the_host(options, queries, route):
    plan = make_plan(DOCS, 4, queries=queries, block_size=64, route=route)
    inputs = random_inputs(plan, HEADS, torch.bfloat16, has_sink=True, has_dlse=True)
    config = SplitKVConfig(**options)
    group = ThreadGroup(4, device="cuda")
    calls = group.run(lambda transport: RankCall(plan, inputs, transport, config, device="cuda"))

    def layer(transport):
        calls[transport.rank].forward()
        calls[transport.rank].backward()

    torch.cuda.set_sync_debug_mode("error")
    try:
        group.run(layer)
        group.run(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_of_ranks(plan: Plan, inputs: Inputs) -> float:
    """Bytes above the inputs at the worst moment of forward and backward, a rank."""
    group = ThreadGroup(plan.cp_size, device="cuda")
    config = SplitKVConfig()
    calls = group.run(lambda transport: RankCall(plan, inputs, transport, config, device="cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def layer(transport):
        calls[transport.rank].forward()
        calls[transport.rank].backward()

    group.run(layer)
    return (torch.cuda.max_memory_allocated() - before) / plan.cp_size


@pytest.fixture
def plain_buffers():
    """At this size filling every buffer with NaN would take longer than the test."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


# A24, with the stages of the default; a single stage has nothing else in flight.
def test_peak_memory_falls_with_every_doubling_of_ranks(plain_buffers):
    q, k, v, dout = (
        torch.randn(131072, 1, 128).bfloat16().expand(-1, heads, -1) for heads in (32, 8, 8, 32)
    )
    inputs = Inputs(q=q, k=k, v=v, dout=dout)
    found = []
    for cp_size in (2, 4, 8):
        plan = make_plan([131072], cp_size)
        found.append(peak_of_ranks(plan, inputs))
        torch.cuda.empty_cache()
    print("peaks above the inputs, MiB a rank:", [f"{peak / 2**20:.0f}" for peak in found])
    assert found[0] >= 1.6 * found[1]
    assert found[1] >= 1.6 * found[2]


def test_random_steps_leave_nothing_behind(plain_buffers):
    group = ThreadGroup(2, device="cuda")

    def step(plan: Plan, inputs: Inputs, config: SplitKVConfig) -> None:
        group.run(lambda t: run_rank(plan, inputs, t, config, device="cuda") and 0)

    drift = drift_of_random_steps(step)
    assert drift < 2**20, f"{drift} bytes"


# Processes that share the GPU.


def staged_rank(plan: Plan, inputs: Inputs, config: SplitKVConfig) -> list[Tensor | None]:
    torch.use_deterministic_algorithms(True)
    transport = transport_of(dist.group.WORLD, torch.device("cuda"), "gloo")
    return run_rank(plan, inputs, transport, config, device="cuda")


@pytest.mark.parametrize("queries", [Causal(), ANCHORS], ids=["causal", "anchors"])
def test_two_processes_over_gloo_give_the_bits_of_two_threads(queries):
    plan = make_plan(DOCS, 2, queries=queries, block_size=64)
    inputs, expected = known(queries)
    for options in ({}, {"keep_queries": True, "partial_dtype": "fp32"}):
        config = SplitKVConfig(**options)
        got = join_ranks(plan, run_gloo(2, staged_rank, plan, inputs, config))
        check(got, expected)
        simulated = run_simulated(plan, inputs, config, device="cuda")
        assert got.fingerprint() == simulated.fingerprint()


# Processes with a GPU each.


def rank_of_two_gpus(plan: Plan, inputs: Inputs, config: SplitKVConfig) -> list[Tensor | None]:
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", device_id=device)
    transport = transport_of(group, device, config.transport)
    return run_rank(plan, inputs, transport, config, device="cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
@pytest.mark.parametrize("queries", [Causal(), ANCHORS], ids=["causal", "anchors"])
def test_two_gpus_give_the_bits_of_two_threads(queries, transport):
    plan = make_plan(DOCS, 2, queries=queries, block_size=64)
    inputs, expected = known(queries)
    for options in ({}, {"keep_queries": True, "partial_dtype": "fp32"}):
        config = SplitKVConfig(transport=transport, **options)
        got = join_ranks(plan, run_gloo(2, rank_of_two_gpus, plan, inputs, config))
        check(got, expected)
        simulated = run_simulated(plan, inputs, config, device="cuda")
        assert got.fingerprint() == simulated.fingerprint()


def one_staged_rank_raises(plan: Plan, inputs: Inputs) -> str:
    """The error of the ranks that go on."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "left"
    transport = transport_of(group, torch.device("cuda"), "gloo")
    with pytest.raises(RuntimeError, match="imed out") as error:
        run_rank(plan, inputs, transport, SplitKVConfig(), device="cuda")
    return str(error.value)


def test_a_rank_that_left_ends_the_others_within_the_timeout():
    plan = make_plan([300], 2, block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)
    mine, theirs = run_gloo(2, one_staged_rank_raises, plan, inputs, timeout_s=30.0)
    assert theirs == "left"
    assert "imed out" in mine
