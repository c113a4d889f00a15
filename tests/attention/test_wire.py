"""What travels: bytes equal the report's prediction, options change bytes and not results."""

from dataclasses import replace

import pytest
import torch

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.plan import Anchors, Causal, Full, Plan, Suffix, Window, make_plan
from megatron_splitkv.plan.report import AttentionShape, report_plan
from megatron_splitkv.plan.route import has_route
from megatron_splitkv.wire import PartialFormat
from tests.ranks import (
    Heads,
    Inputs,
    Outputs,
    RankCall,
    RecordingTransport,
    assert_outputs,
    dense,
    join_ranks,
    random_inputs,
    run_simulated,
)
from tests.tolerances import BY_DTYPE, FP32, GRADIENT_BY_DTYPE

FORMATS = ("fp32", "bf16", "fp16")
HEADS = Heads(q=3, kv=1, dim_qk=5, dim_v=8)  # no field fills its 16 bytes by chance
ANCHORS = Anchors(((0, 3, 60), (100, 128)), 4)


def run_recorded(
    plan: Plan, inputs: Inputs, config: SplitKVConfig
) -> tuple[Outputs, list[tuple[int, int]], list[list[tuple]]]:
    """Results, bytes that each rank sent (forward, backward), and its collectives."""

    def body(inner):
        transport = RecordingTransport(inner)
        call = RankCall(plan, inputs, transport, config)
        call.forward()
        forward = transport.bytes_sent
        call.backward()
        return call.parts, (forward, transport.bytes_sent - forward), transport.calls

    parts, sent, calls = zip(*ThreadGroup(plan.cp_size).run(body), strict=True)
    return join_ranks(plan, parts), list(sent), list(calls)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("queries", [Causal(), Window(9), Full(), Suffix(20), ANCHORS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_bytes_are_those_of_the_report(cp_size, queries, dtype, route):
    if route == "keys" and not has_route(route, queries):
        pytest.skip("this mask has no such route")
    plan = make_plan([60, 128], cp_size, queries=queries, block_size=8, route=route)
    inputs = random_inputs(plan, HEADS, dtype)
    shape = AttentionShape(
        num_heads_q=HEADS.q, num_heads_kv=HEADS.kv, head_dim_qk=HEADS.dim_qk,
        head_dim_v=HEADS.dim_v,
        dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
    )  # fmt: skip
    for num_stages in (1, 2, 4):
        for options in ({}, {"keep_queries": True}, *({"partial_dtype": x} for x in FORMATS)):
            config = SplitKVConfig(num_stages=num_stages, **options)
            _, sent, _ = run_recorded(plan, inputs, config)
            report = report_plan(plan, shape, config)
            assert [forward for forward, _ in sent] == list(report.bytes_forward)
            assert [backward for _, backward in sent] == list(report.bytes_backward)


def test_bytes_between_the_fields_of_partials_are_zero():
    """One head: 6 and 10 bytes of values and 4 of each scale, each field padded to 16."""
    wire = PartialFormat(partial_dtype="fp16", num_heads=1, dims=(3, 5), has_lse=False)
    packed = torch.full((4, wire.row_bytes), 7, dtype=torch.uint8)
    wire.pack([torch.ones(4, 1, 3), torch.ones(4, 1, 5)], into=packed)
    fields = [(0, 6), (16, 26), (32, 36), (48, 52)]
    is_field = torch.zeros(64, dtype=torch.bool)
    for begin, end in fields:
        is_field[begin:end] = True
    assert packed.shape == (4, 64)
    assert (packed[:, ~is_field] == 0).all() and (packed[:, 0:6] != 7).all()


@pytest.mark.parametrize("length", [4096, 8192])
def test_one_all_gather_where_all_need_all(length):
    plan = make_plan([length], 4, queries=Full(), block_size=256)
    inputs = random_inputs(plan, Heads(q=1, kv=1, dim_qk=4, dim_v=4))
    _, sent, calls = run_recorded(plan, inputs, SplitKVConfig(num_stages=1))
    kinds = [[name for name, *_ in rank] for rank in calls]
    assert kinds == [["all_gather", "exchange"] * 2] * 4
    rows = 3 * length // 4
    assert sent == [(rows * (16 + 16 + 16), rows * (16 + 16 + 16 + 16 + 16))] * 4


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "queries", [Suffix(16), Anchors(((0, 100, 128, 256),), 4)], ids=["suffix", "anchors"]
)
def test_bytes_do_not_grow_with_the_context(num_stages, queries):
    """The same query rows, twice and four times the keys, spread so that all ranks are needed."""
    sent = []
    for times in (1, 2, 4):
        spec = queries
        if isinstance(queries, Anchors):
            anchors = tuple(anchor * times for anchor in queries.positions[0])
            spec = Anchors((anchors,), queries.rows_per_anchor)
        plan = make_plan([256 * times], 4, queries=spec, block_size=4 * times)
        inputs = random_inputs(plan, HEADS)
        got, bytes_sent, _ = run_recorded(plan, inputs, SplitKVConfig(num_stages=num_stages))
        assert_outputs(got, dense(plan, inputs))
        sent.append(bytes_sent)
    assert sent[0] == sent[1] == sent[2]
    assert sum(forward for forward, _ in sent[0]) > 0


def test_documents_on_one_rank_send_nothing():
    plan = make_plan([32] * 8, 4, block_size=32)
    _, sent, calls = run_recorded(plan, random_inputs(plan, HEADS), SplitKVConfig(num_stages=3))
    assert sent == [(0, 0)] * 4
    assert calls == [[]] * 4, "nor do they call a collective"


@pytest.mark.parametrize(
    ("queries", "route"),
    [(Causal(), "queries"), (Causal(), "keys"), (ANCHORS, "queries")],
    ids=["causal", "causal, keys", "anchors"],
)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_kept_rows_change_no_bit(queries, route, num_stages):
    plan = make_plan([60, 128], 4, queries=queries, block_size=8, route=route)
    inputs = random_inputs(plan, HEADS, has_dlse=True)
    config = SplitKVConfig(num_stages=num_stages)
    first = run_simulated(plan, inputs, config)
    second = run_simulated(plan, inputs, replace(config, keep_queries=True))
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("queries", [Causal(), Full(), ANCHORS], ids=str)
@pytest.mark.parametrize("cp_size", [2, 8])
@pytest.mark.parametrize("partial_dtype", ["bf16", "fp16"])
def test_cheap_partials_stay_within_a_rounding(queries, cp_size, partial_dtype):
    """Only out and dq travel rounded; lse and dv come out as with fp32, dk sees delta."""
    plan = make_plan([60, 128], cp_size, queries=queries, block_size=8)
    inputs = random_inputs(plan, Heads(q=4, kv=2, dim_qk=16, dim_v=16), has_dlse=True)
    config = SplitKVConfig(partial_dtype=partial_dtype)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[partial_dtype]
    rounded = GRADIENT_BY_DTYPE[dtype]
    expected = dense(plan, inputs)
    got = run_simulated(plan, inputs, config)
    assert_outputs(
        got, expected, out=BY_DTYPE[dtype], dq=rounded, dk=rounded, dv=FP32, dblock_k=rounded,
        dblock_v=FP32,
    )  # fmt: skip
    travelled = (got.out.double() - expected.out).norm() / expected.out.norm()
    assert travelled > 3e-5, "the option must have an effect"


@pytest.mark.parametrize("partial_dtype", ["bf16", "fp16"])
def test_cheap_gradients_of_keys_stay_within_a_rounding(partial_dtype):
    """Where keys travel only dk and dv come back rounded; out, lse and dq are final and local."""
    plan = make_plan([60, 128], 4, block_size=8, route="keys")
    inputs = random_inputs(plan, Heads(q=4, kv=2, dim_qk=16, dim_v=8), has_dlse=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[partial_dtype]
    rounded = GRADIENT_BY_DTYPE[dtype]
    expected = dense(plan, inputs)
    got = run_simulated(plan, inputs, SplitKVConfig(partial_dtype=partial_dtype))
    assert_outputs(got, expected, out=FP32, dq=FP32, dk=rounded, dv=rounded)
    for mine, theirs in ((got.dk, expected.dk), (got.dv, expected.dv)):
        assert (mine.double() - theirs).norm() / theirs.norm() > 3e-5, "the option has an effect"


# A17: what travels by default must not show beside the error of one rank. Under a full mask every
# rank has an equal share in each row: the hardest case.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_default_partials_keep_the_error_of_one_rank(dtype):
    errors = {"out": [], "dq": []}
    for cp_size in (1, 8):
        plan = make_plan([1024], cp_size, queries=Full(), block_size=64)
        inputs = random_inputs(plan, Heads(q=2, kv=1, dim_qk=64, dim_v=64), dtype, seed=17)
        got, expected = run_simulated(plan, inputs), dense(plan, inputs)
        for name, found in errors.items():
            theirs = getattr(expected, name)
            found.append(float((getattr(got, name).double() - theirs).norm() / theirs.norm()))
    for name, (one, eight) in errors.items():
        assert eight <= 1.25 * one, f"{name}: {eight} at cp 8, {one} at cp 1"


def test_partials_of_one_rank_are_never_rounded():
    plan = make_plan([60, 128], 1)
    inputs = random_inputs(plan, HEADS)
    assert_outputs(
        run_simulated(plan, inputs, SplitKVConfig(partial_dtype="bf16")), dense(plan, inputs)
    )


@pytest.mark.parametrize("partial_dtype", FORMATS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_rank_runs_the_same_collectives(partial_dtype, route):
    plan = make_plan([60, 128, 1], 4, block_size=8, route=route)
    config = SplitKVConfig(num_stages=2, partial_dtype=partial_dtype)
    _, _, calls = run_recorded(plan, random_inputs(plan, HEADS), config)
    assert len({tuple(call[:2] for call in rank) for rank in calls}) == 1
    assert calls[0], "documents are shared"
    for step in range(len(calls[0])):
        for rank, peer in ((r, p) for r in range(4) for p in range(4)):
            assert calls[rank][step][2][peer] == calls[peer][step][3][rank]
