"""Moving rows: the wire format, the way out and back, and the fingerprint check."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_splitkv.comm import (
    RowFormat,
    ThreadGroup,
    Transport,
    check_same_plan,
    gather_rows,
    return_rows,
)
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Full, Plan, Window, make_plan, plan_exchange
from tests.gloo import run_gloo
from tests.packs import owner_of_rows
from tests.transports import on_gloo

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
    rows, lse = torch.tensor([5, 0, 5]), torch.randn(6, 4)
    both = RowFormat((*row_format.fields, (lse.shape[1:], lse.dtype)))
    back, beside = both.unpack(both.pack([q, lse], rows))
    assert torch.equal(back, q[rows]) and torch.equal(beside, lse[rows])


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
        packed = gather_rows(out_format, [mine[:, None], payload], stage, transport).wait()
        index, arrived = out_format.unpack(packed)
        assert torch.equal(arrived, index.bfloat16().expand(-1, 3))
        maker = torch.full_like(index, transport.rank)
        answer = back_format.pack([torch.cat([index, maker], 1)])
        (returned,) = back_format.unpack(return_rows(answer, stage, transport).wait())
        answers.append(returned)
        assert torch.equal(returned[:, 0], mine[stage.send_rows])
        makers = torch.arange(layout.cp_size).repeat_interleave(
            torch.from_numpy(stage.counts[transport.rank])
        )
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
        is_any = plan_exchange(plan).travelling().any()
        assert len(mine) == len(theirs) == (num_stages if is_any else 0)
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
