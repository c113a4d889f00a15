"""The naive twins against the oracle, so that either may stand in for the other."""

import pytest
import torch

from megatron_splitkv.ops import add_partials_, encode_partials_, merge_partials_, reference
from tests import tolerances
from tests.ops.cases import INTERVALS, Shape, make_case
from tests.oracle import assert_lse_matches, assert_matches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_twins_of_partial_attention(intervals: str, dtype: torch.dtype) -> None:
    case = make_case(Shape(heads_q=4, heads_kv=2, dim_v=24), intervals=intervals, dtype=dtype)
    oracle = case.oracle()
    intervals_of_rows = (case.kv_begin, case.kv_end)
    scale = case.softmax_scale
    out, lse = reference.partial_attention(
        case.q, case.k, case.v, *intervals_of_rows, softmax_scale=scale
    )
    assert_matches("out", out, oracle.out, tolerances.FP32)
    assert_lse_matches(lse, oracle.lse)
    delta = case.delta(out)
    dk, dv = torch.zeros(case.k.shape), torch.zeros(case.v.shape)
    tensors = (case.dout, case.q, case.k, case.v, lse, delta, *intervals_of_rows, dk, dv)
    dq = reference.partial_attention_backward(*tensors, softmax_scale=scale)
    for name, got, expected in (
        ("dq", dq, oracle.dq),
        ("dk", dk, oracle.dk),
        ("dv", dv, oracle.dv),
    ):
        assert_matches(name, got, expected, tolerances.FP32)
    rounded = [torch.full(x.shape, torch.nan, dtype=dtype) for x in (dk, dv)]
    reference.partial_attention_backward(
        *tensors[:-2], *rounded, softmax_scale=scale, accumulate=False
    )
    assert torch.equal(rounded[0], dk.to(dtype))
    assert torch.equal(rounded[1], dv.to(dtype))


def test_twin_of_no_keys() -> None:
    case = make_case(Shape(keys=0))
    out, lse = reference.partial_attention(
        case.q, case.k, case.v, case.kv_begin, case.kv_end, softmax_scale=1.0
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_twin_of_merge() -> None:
    out, lse = torch.randn(9, 2, 8), torch.randn(9, 2)
    part_out, part_lse = torch.randn(12, 2, 8), torch.randn(12, 2)
    for outs, lses, empty in ((out, lse, [0, 3]), (part_out, part_lse, [0, 4, 5])):
        outs[empty], lses[empty] = torch.nan, -torch.inf
    ptr = torch.tensor([0, 1, 1, 4, 6, 6, 8, 9, 10, 12]).int()
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]).int()
    scale = torch.rand(12, 2) + 0.5
    twin_out, twin_lse = out.clone(), lse.clone()
    reference.merge_partials_(twin_out, twin_lse, part_out, part_lse, ptr, slots, scale)
    merge_partials_(out, lse, part_out, part_lse, ptr, slots, scale)
    assert twin_lse[0, 0] == -torch.inf and (twin_out[0] == 0).all()
    torch.testing.assert_close(twin_out, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(twin_lse, lse, rtol=1e-6, atol=1e-6)
    first, twin = torch.full_like(out, torch.nan).half(), torch.full_like(out, torch.nan).half()
    reference.merge_partials_(
        twin, twin_lse, part_out, part_lse, ptr, slots, scale, accumulate=False
    )
    merge_partials_(first, lse, part_out, part_lse, ptr, slots, scale, accumulate=False)
    torch.testing.assert_close(twin, first)
    torch.testing.assert_close(twin_lse, lse, rtol=1e-6, atol=1e-6)


def test_twins_of_encode_and_add() -> None:
    values, total = torch.randn(12, 2, 8) * 100, torch.randn(3, 2, 8)
    values[4, 1] = 0.0
    coded = [(torch.empty(12, 2, 8, dtype=torch.float16), torch.empty(12, 2)) for _ in range(2)]
    encode_partials_(*coded[0], values)
    sent_lse, lse = torch.empty(12, 2), torch.randn(12, 2)
    reference.encode_partials_(*coded[1], values, sent_lse, lse)
    assert all(map(torch.equal, *coded)) and torch.equal(sent_lse, lse)
    rows = torch.tensor([4, 0, 4, 11])
    chosen = [[x[:4].clone() for x in (*pair, sent_lse)] for pair in coded]
    for encode, (part, factor, sent) in zip(
        (encode_partials_, reference.encode_partials_), chosen, strict=True
    ):
        encode(part, factor, values, sent, lse, rows)
    assert all(map(torch.equal, *chosen)) and torch.equal(chosen[0][2], lse[rows])
    ptr, slots = torch.tensor([0, 5, 5, 9]).int(), torch.tensor([3, 11, 0, 4, 4, 1, 2, 7, 8]).int()
    twin = total.clone()
    encoded, scale = coded[0][0], coded[0][1] / 100  # sums of N(0, 1): the tolerance is for these
    reference.add_partials_(twin, encoded, ptr, slots, scale)
    add_partials_(total, encoded, ptr, slots, scale)
    torch.testing.assert_close(total, twin, rtol=1e-6, atol=1e-5)
    reference.add_partials_(twin, encoded, ptr, slots, scale, accumulate=False)
    add_partials_(total, encoded, ptr, slots, scale, accumulate=False)
    torch.testing.assert_close(total, twin, rtol=1e-6, atol=1e-5)
