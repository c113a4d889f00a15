"""Moving rows: wire format, both transports, the fingerprint check, and errors that do not hang."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.comm import (
    ProcessGroupTransport,
    RowFormat,
    ThreadGroup,
    Transport,
    check_same_plan,
    gather_rows,
    return_rows,
)
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Full, Plan, Window, make_plan
from tests.gloo import GlooError, run_gloo, run_outcomes
from tests.packs import owner_of_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


# Wire format.


@st.composite
def row_formats(draw: st.DrawFn) -> RowFormat:
    shape = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
    fields = st.lists(st.tuples(shape, st.sampled_from(DTYPES)), min_size=1, max_size=4)
    return RowFormat(tuple(draw(fields)))


def random_rows(row_format: RowFormat, num_rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(num_rows, *shape, generator=generator) * 50).to(dtype)
        for shape, dtype in row_format.fields
    ]


@settings(max_examples=150, deadline=None)
@given(row_formats(), st.integers(0, 9))
def test_packed_rows_come_back_bitwise(row_format, num_rows):
    tensors = random_rows(row_format, num_rows)
    packed = row_format.pack(tensors)
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_rows, row_format.row_bytes)
    assert packed.is_contiguous()
    assert row_format.row_bytes % 16 == 0
    for field, tensor in zip(row_format.unpack(packed), tensors, strict=True):
        assert field.dtype == tensor.dtype
        assert field.shape == tensor.shape
        assert torch.equal(bits(field), bits(tensor))
        assert field.numel() == 0 or field.data_ptr() % 16 == packed.data_ptr() % 16


@settings(max_examples=50, deadline=None)
@given(row_formats(), st.lists(st.integers(0, 6), max_size=12))
def test_chosen_rows_are_packed_in_the_order_given(row_format, rows):
    tensors = random_rows(row_format, 7)
    index = torch.tensor(rows, dtype=torch.int64)
    packed = row_format.pack(tensors, index)
    assert len(packed) == len(rows)
    for field, tensor in zip(row_format.unpack(packed), tensors, strict=True):
        assert torch.equal(bits(field), bits(tensor[index]))


def test_row_bytes_by_hand():
    fields = (((3, 5), torch.bfloat16), ((3,), torch.float32), ((16,), torch.uint8))
    assert RowFormat(fields).row_bytes == 32 + 16 + 16


def test_packing_casts_to_the_format_and_keeps_infinities():
    row_format = RowFormat((((2,), torch.bfloat16), ((1,), torch.float32)))
    values = torch.tensor([[1.0 + 2**-12, -torch.inf]])
    first, second = row_format.unpack(row_format.pack([values, values[:, :1]]))
    assert first.tolist() == [[1.0, -torch.inf]]
    assert second.tolist() == [[1.0 + 2**-12]]


def test_packing_takes_views():
    """q is often a view into a fused projection: rows and heads with any stride."""
    fused = torch.randn(6, 4, 3, 8)
    q = fused[:, :, 1]
    row_format = RowFormat(((q.shape[1:], q.dtype),))
    (back,) = row_format.unpack(row_format.pack([q]))
    assert torch.equal(back, q)


# Transports: both against the same hand-made answer.


def counts_between(size: int, seed: int) -> torch.Tensor:
    """Rows from each rank to each rank, uneven and with many zeros, `[size, size]`."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (size, size), generator=generator)
    return counts * (torch.rand(size, size, generator=generator) < 0.6)


def rows_between(source: int, destination: int, count: int, row_bytes: int) -> torch.Tensor:
    values = torch.arange(count * row_bytes) + 31 * source + 7 * destination
    return (values % 251).to(torch.uint8).view(count, row_bytes)


def exchange_body(transport: Transport, seed: int, row_bytes: int) -> list[torch.Tensor]:
    """Two exchanges in flight at once, then an all_gather; what arrived."""
    size, rank = transport.size, transport.rank
    pending = []
    for step in range(2):
        counts = counts_between(size, seed + step)
        outgoing = torch.cat(
            [rows_between(rank, peer, int(counts[rank, peer]), row_bytes) for peer in range(size)]
        )
        sent, received = counts[rank].tolist(), counts[:, rank].tolist()
        pending.append(transport.exchange(outgoing, sent, received))
    gathered = transport.all_gather(rows_between(rank, 0, seed % 3, row_bytes))
    return [*(item.wait() for item in pending), gathered.wait()]


def check_exchange(size: int, seed: int, row_bytes: int, results: list[list[torch.Tensor]]) -> None:
    for rank, result in enumerate(results):
        for step in range(2):
            counts = counts_between(size, seed + step)
            expected = [
                rows_between(peer, rank, int(counts[peer, rank]), row_bytes) for peer in range(size)
            ]
            assert torch.equal(result[step], torch.cat(expected))
        everyone = [rows_between(peer, 0, seed % 3, row_bytes) for peer in range(size)]
        assert torch.equal(result[2], torch.stack(everyone))


def on_gloo(body, *arguments):
    """Runs a body that takes a transport, on the world group."""
    return body(ProcessGroupTransport(group=dist.group.WORLD), *arguments)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_thread_transport(size, seed):
    group = ThreadGroup(size)
    results = group.run(lambda transport: exchange_body(transport, seed, 16))
    check_exchange(size, seed, 16, results)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo_transport(size):
    for seed in range(3):
        check_exchange(size, seed, 48, run_gloo(size, on_gloo, exchange_body, seed, 48))


def rank_and_size(transport: Transport) -> tuple[int, int]:
    return transport.rank, transport.size


def test_ranks_of_both_transports():
    assert ThreadGroup(3).run(rank_and_size) == [(0, 3), (1, 3), (2, 3)]
    assert run_gloo(3, on_gloo, rank_and_size) == [(0, 3), (1, 3), (2, 3)]


def subgroup_body() -> tuple[int, int, list[int]]:
    """Ranks of a group are counted inside it, not in the world."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    transport = ProcessGroupTransport(group=groups[dist.get_rank() % 2])
    me = torch.tensor([[dist.get_rank()]], dtype=torch.uint8)
    everyone = transport.all_gather(me).wait().flatten().tolist()
    return transport.rank, transport.size, everyone


def test_a_subgroup_has_its_own_ranks():
    assert run_gloo(4, subgroup_body) == [
        (0, 2, [0, 2]),
        (0, 2, [1, 3]),
        (1, 2, [0, 2]),
        (1, 2, [1, 3]),
    ]


# Gather and return through the exchange tables.


def round_trip(transport: Transport, plan: Plan, num_stages: int) -> list[torch.Tensor]:
    """Sends each row's stream index with a bf16 payload; every answer names its maker."""
    layout = build_layout(plan, transport.rank, num_stages=num_stages)
    mine = torch.from_numpy(owner_of_rows(plan) == transport.rank).nonzero()[:, 0]
    payload = mine[:, None].bfloat16().expand(-1, 3)
    out_format = RowFormat((((1,), torch.int64), ((3,), torch.bfloat16)))
    back_format = RowFormat((((2,), torch.int64),))
    answers = []
    for stage in layout.stages:
        packed = gather_rows(
            lambda rows: out_format.pack([mine[:, None], payload], rows), stage, transport
        ).wait()
        index, arrived = out_format.unpack(packed)
        assert torch.equal(arrived, index.bfloat16().expand(-1, 3))
        maker = torch.full_like(index, transport.rank)
        answer = back_format.pack([torch.cat([index, maker], 1)])
        (returned,) = back_format.unpack(return_rows(answer, stage, transport).wait())
        answers.append(returned)
        assert torch.equal(returned[:, 0], mine[stage.send_rows])
        makers = torch.arange(layout.cp_size).repeat_interleave(torch.tensor(stage.send_counts))
        assert torch.equal(returned[:, 1], makers)
    return answers


PLANS = (
    (make_plan([40, 3, 0, 1], 4, block_size=4), 1),
    (make_plan([40, 3, 0, 1], 4, block_size=4), 3),
    (make_plan([48], 4, queries=Full(), block_size=4), 1),  # one all_gather
    (make_plan([16] * 4, 4, queries=Causal(), block_size=16), 2),  # no row travels
    (make_plan([2], 4, queries=Window(2), block_size=1), 1),  # ranks without a token
)


@pytest.mark.parametrize(("plan", "num_stages"), PLANS)
def test_rows_go_out_and_answers_come_back(plan, num_stages):
    simulated = ThreadGroup(4).run(lambda transport: round_trip(transport, plan, num_stages))
    real = run_gloo(4, on_gloo, round_trip, plan, num_stages)
    for mine, theirs in zip(simulated, real, strict=True):
        assert len(mine) == len(theirs) == min(num_stages, 3)
        assert all(map(torch.equal, mine, theirs))


# Fingerprints.


def fingerprint_body(transport: Transport, fingerprints: list[str]) -> str | None:
    try:
        check_same_plan(fingerprints[transport.rank], transport, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", ["0" * 16, "f" * 16, "7" + "f" * 15, "8" + "0" * 15])
def test_equal_fingerprints_pass(value):
    assert ThreadGroup(3).run(lambda t: fingerprint_body(t, [value] * 3)) == [None] * 3


def test_different_plans_are_the_same_error_on_every_rank():
    fingerprints = [make_plan(docs, 3).fingerprint for docs in ([9, 7], [9, 7], [7, 9])]
    simulated = ThreadGroup(3).run(lambda t: fingerprint_body(t, fingerprints))
    real = run_gloo(3, on_gloo, fingerprint_body, fingerprints)
    assert len({*simulated, *real}) == 1
    message = simulated[0]
    assert "hold different plans" in message
    assert "must be fed the same documents" in message
    for rank, fingerprint in enumerate(fingerprints):
        assert f"rank {rank}: {fingerprint}" in message


# One rank fails: the others end too, with its error.


def test_a_raising_thread_rank_releases_the_others():
    released = []

    def body(transport: Transport) -> None:
        if transport.rank == 1:
            raise ValueError("document 3 is broken")
        try:
            transport.exchange(torch.zeros(0, 16, dtype=torch.uint8), [0] * 3, [0] * 3).wait()
        except threading.BrokenBarrierError:
            released.append(transport.rank)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="document 3 is broken"):
        ThreadGroup(3, timeout_s=30.0).run(body)
    assert sorted(released) == [0, 2]
    assert time.monotonic() - start < 10.0


def test_a_missing_thread_rank_is_a_timeout():
    def body(transport: Transport) -> None:
        if transport.rank != 1:
            transport.all_gather(torch.zeros(1, 16, dtype=torch.uint8)).wait()

    with pytest.raises(threading.BrokenBarrierError):
        ThreadGroup(2, timeout_s=0.2).run(body)


def test_tables_that_disagree_are_caught():
    def body(transport: Transport) -> None:
        rows = torch.zeros(2, 16, dtype=torch.uint8)
        transport.exchange(rows, [1, 1], [1, 1 + transport.rank]).wait()

    with pytest.raises(AssertionError, match="exchange tables disagree"):
        ThreadGroup(2, timeout_s=5.0).run(body)


def one_rank_raises() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        raise ValueError("document 3 is broken")
    transport = ProcessGroupTransport(group=group)
    transport.exchange(torch.zeros(3, 16, dtype=torch.uint8), [1, 1, 1], [1, 1, 1]).wait()
    return "reached"


def test_a_raising_process_rank_ends_the_others_within_the_timeout():
    outcomes = run_outcomes(3, one_rank_raises, timeout_s=30.0)
    assert "ValueError: document 3 is broken" in outcomes[1].error
    for rank in (0, 2):
        assert outcomes[rank].is_done, "hung"
        assert "imed out" in outcomes[rank].error, outcomes[rank].error


def sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def fail_on_rank_1() -> None:
    assert dist.get_rank() != 1, "as told"


def test_the_gloo_helper_names_what_failed_and_what_hung():
    with pytest.raises(GlooError, match=r"(?s)hung for 1\.0 s.*did not finish: \[0\]"):
        run_gloo(2, sleep_on_rank_0, timeout_s=1.0)
    with pytest.raises(GlooError, match=r"(?s)rank 1 of 2:.*as told.*did not finish: \[\]"):
        run_gloo(2, fail_on_rank_1)
    assert run_gloo(2, on_gloo, rank_and_size) == [(0, 2), (1, 2)]
