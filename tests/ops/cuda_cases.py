"""The op cases of the CPU tests, on a GPU."""

import dataclasses

import torch
from torch import Tensor

from megatron_splitkv.ops import WorkLists, partial_attention, partial_attention_backward
from tests import tolerances
from tests.ops.cases import Case, Intervals, Shape, make_case
from tests.oracle import Oracle, assert_lse_matches, assert_matches, attend, mask_from_intervals

# Large and finite: what no row sees must be finite on CUDA, values in the forward and everything in
# the backward.
HIDDEN_VALUE = 1e4


def make_cuda_case(
    shape: Shape,
    *,
    intervals: str | Intervals = "random",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    """`make_case` with tensors on the GPU."""
    case = make_case(shape, intervals=intervals, dtype=dtype, seed=seed)
    case = dataclasses.replace(case, v=case.v.nan_to_num(HIDDEN_VALUE))
    tensors = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    moved = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in tensors.items()}
    return Case(**moved)


def forward(case: Case, out_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Runs the op, with a work list of its own."""
    return partial_attention(
        case.q,
        case.k,
        case.v,
        case.kv_begin,
        case.kv_end,
        softmax_scale=case.softmax_scale,
        out_dtype=out_dtype,
        work=WorkLists(case.kv_begin.cpu(), case.kv_end.cpu()),
    )


def make_backward_case(
    shape: Shape,
    *,
    intervals: str | Intervals = "random",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    """`make_cuda_case` without NaN."""
    case = make_cuda_case(shape, intervals=intervals, dtype=dtype, seed=seed)
    q, k, dout = (x.nan_to_num(HIDDEN_VALUE) for x in (case.q, case.k, case.dout))
    return dataclasses.replace(case, q=q, k=k, dout=dout)


def backward(
    case: Case,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    is_deterministic: bool = False,
    accumulate: bool = True,
) -> Tensor:
    """Runs the op, with a work list of its own; returns dq."""
    begin, end = case.kv_begin.cpu(), case.kv_end.cpu()
    return partial_attention_backward(
        case.dout,
        case.q,
        case.k,
        case.v,
        lse,
        delta,
        case.kv_begin,
        case.kv_end,
        dk,
        dv,
        softmax_scale=case.softmax_scale,
        accumulate=accumulate,
        work=WorkLists(begin, end, is_deterministic=is_deterministic),
    )


def oracle_with_gradients(case: Case) -> Oracle:
    """The fp64 result."""
    mask = mask_from_intervals(case.kv_begin.cpu(), case.kv_end.cpu(), len(case.k))
    return attend(case.q, case.k, case.v, mask, softmax_scale=case.softmax_scale, dout=case.dout)


def softmax_of(case: Case, oracle: Oracle) -> tuple[Tensor, Tensor]:
    """lse and delta as the backward takes them, delta NaN in rows that see no key."""
    delta = (case.dout.cpu().double() * oracle.out).sum(dim=-1)
    is_empty = oracle.lse == -torch.inf
    return oracle.lse.float().cuda(), delta.masked_fill(is_empty, torch.nan).float().cuda()


def check_rounding(
    case: Case, oracle: Oracle, lse: Tensor, delta: Tensor, *, is_deterministic: bool
) -> None:
    """dk and dv in the dtype of the inputs, whatever they held: the bits of fp32, rounded once."""
    exact, rounded = (
        [torch.full(x.shape, torch.nan, dtype=dtype, device="cuda") for x in (case.k, case.v)]
        for dtype in (torch.float32, case.q.dtype)
    )
    mode = {"is_deterministic": is_deterministic, "accumulate": False}
    backward(case, lse, delta, *exact, **mode)
    dq = backward(case, lse, delta, *rounded, **mode)
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[case.q.dtype]
    assert_matches("dq", dq, oracle.dq, tolerance)
    is_unseen = ~mask_from_intervals(case.kv_begin, case.kv_end, len(case.k)).any(dim=0)
    expected = {"dk": oracle.dk, "dv": oracle.dv}
    for (name, want), full, got in zip(expected.items(), exact, rounded, strict=True):
        assert_matches(name, full, want, tolerance)
        assert_matches(f"rounded {name}", got, want, tolerance)
        assert torch.equal(got, full.to(got.dtype)), f"{name} is not rounded to nearest"
        assert (got.cpu()[is_unseen] == 0).all(), f"{name} of an unseen key is not zero"


def check_backward(case: Case, *, is_deterministic: bool = False) -> None:
    """Backward under the exact softmax against the oracle; dk and dv are accumulated into.

    Once more for gradients in the dtype of the inputs.
    """
    oracle = oracle_with_gradients(case)
    lse, delta = softmax_of(case, oracle)
    check_rounding(case, oracle, lse, delta, is_deterministic=is_deterministic)
    dk = torch.ones(case.k.shape, device="cuda")
    dv = torch.full(case.v.shape, -2.0, device="cuda")
    dq = backward(case, lse, delta, dk, dv, is_deterministic=is_deterministic)
    is_unseen = ~mask_from_intervals(case.kv_begin, case.kv_end, len(case.k)).any(dim=0)
    assert (dk.cpu()[is_unseen] == 1.0).all(), "dk of an unseen key was touched"
    assert (dv.cpu()[is_unseen] == -2.0).all(), "dv of an unseen key was touched"
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[case.q.dtype]
    assert_matches("dq", dq, oracle.dq, tolerance)
    assert_matches("dk", dk.double() - 1.0, oracle.dk, tolerance)
    assert_matches("dv", dv.double() + 2.0, oracle.dv, tolerance)
    assert (dq[oracle.lse[:, 0] == -torch.inf] == 0).all(), "dq of an empty row is not exactly zero"


def oracle_of(case: Case) -> Oracle:
    """The fp64 result, without gradients."""
    mask = mask_from_intervals(case.kv_begin.cpu(), case.kv_end.cpu(), len(case.k))
    return attend(case.q, case.k, case.v, mask, softmax_scale=case.softmax_scale)


def check_forward(case: Case, out_dtype: torch.dtype = torch.float32) -> None:
    """Forward against the oracle."""
    oracle = oracle_of(case)
    out, lse = forward(case, out_dtype)
    assert out.dtype == out_dtype
    assert_lse_matches(lse, oracle.lse, tolerances.CUDA_LSE_ABS)
    tolerance = tolerances.cuda_forward(case.q.dtype, out_dtype)
    assert_matches("out", out, oracle.out, tolerance)
    assert (out[oracle.lse[:, 0] == -torch.inf] == 0).all(), "an empty row is not exactly zero"
