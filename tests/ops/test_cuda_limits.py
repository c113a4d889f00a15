"""Forward and backward on a GPU at the edges of their contract: large logits, far addresses,
expanded inputs, streams; and agreement with the CPU kernels and the naive twin."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_splitkv.ops import (
    attention_delta,
    partial_attention,
    partial_attention_backward,
    reference,
)
from tests import tolerances
from tests.ops.cases import INTERVALS, Case, Shape
from tests.ops.cuda_cases import (
    backward,
    check_backward,
    check_forward,
    forward,
    make_backward_case,
    oracle_with_gradients,
    softmax_of,
)
from tests.oracle import assert_lse_matches, assert_matches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

SHAPE = Shape(rows=300, keys=400, heads_q=4, heads_kv=2, dim_qk=128, dim_v=128)
DOC_LEN = 8192


def test_memory_of_outputs_and_workspaces_starts_as_nan() -> None:
    on_device = torch.zeros(1, device="cuda")
    assert on_device.new_empty(7).isnan().all()
    assert on_device.new_empty(28, dtype=torch.uint8).view(torch.float32).isnan().all()


@pytest.mark.parametrize("intervals", INTERVALS)
def test_agrees_with_the_cpu_and_the_naive_twin(intervals: str) -> None:
    case = make_backward_case(SHAPE, intervals=intervals, seed=1)
    on_cpu = [x.cpu() for x in (case.q, case.k, case.v, case.kv_begin, case.kv_end)]
    scale = case.softmax_scale
    twin_out, twin_lse = reference.partial_attention(*on_cpu, softmax_scale=scale)
    delta = (case.dout.cpu().float() * twin_out).sum(dim=-1)
    dk, dv = torch.zeros(case.k.shape), torch.zeros(case.v.shape)
    twin = [case.dout.cpu(), *on_cpu[:3], twin_lse, delta, *on_cpu[3:], dk, dv]
    twin_dq = reference.partial_attention_backward(*twin, softmax_scale=scale)
    cpu_gradients = [torch.zeros(case.k.shape), torch.zeros(case.v.shape)]
    cpu_dq = partial_attention_backward(*twin[:8], *cpu_gradients, softmax_scale=scale)
    gradients = [torch.zeros(case.k.shape, device="cuda") for _ in range(2)]
    dq = backward(case, twin_lse.cuda(), delta.cuda(), *gradients)
    out, lse = forward(case)
    cpu_out, cpu_lse = partial_attention(*on_cpu, softmax_scale=scale)
    for expected in (twin_lse, cpu_lse):
        assert_lse_matches(lse, expected, tolerances.CUDA_LSE_ABS)
    for expected in (twin_out, cpu_out):
        assert_matches("out", out, expected, tolerances.CUDA_BF16)
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[torch.bfloat16]
    for others in ((twin_dq, dk, dv), (cpu_dq, *cpu_gradients)):
        for name, got, expected in zip(("dq", "dk", "dv"), (dq, *gradients), others, strict=True):
            assert_matches(name, got, expected, tolerance)


@pytest.mark.parametrize("logit", [1e4, -1e4])
def test_large_logits_in_the_backward(logit: float) -> None:
    case = make_backward_case(SHAPE, intervals="full", seed=6)
    q, k = case.q.clone(), case.k.clone()
    q[..., 0] = 100.0
    k[..., 0] = logit / 100.0
    shifted = dataclasses.replace(case, q=q, k=k, softmax_scale=1.0)
    oracle = oracle_with_gradients(shifted)
    dk, dv = torch.zeros(k.shape, device="cuda"), torch.zeros(case.v.shape, device="cuda")
    dq = backward(shifted, *softmax_of(shifted, oracle), dk, dv)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    # A logit of 1e4 and its lse are each rounded to 1e-3 in fp32, which p passes on. The column
    # that makes logits large is left out: there dq is a sum of ds, which cancels to 0, times 100.
    tolerance = tolerances.Tolerance(rel_l2=1e-2, worst_row=3e-2)
    assert_matches("dq", dq[..., 1:], oracle.dq[..., 1:], tolerance)
    assert_matches("dk", dk[..., 1:], oracle.dk[..., 1:], tolerance)
    assert_matches("dv", dv, oracle.dv, tolerance)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_expanded_heads(name: str) -> None:
    """One stored head that stands for all: a stride of 0."""
    case = make_backward_case(SHAPE, seed=2)
    tensor = getattr(case, name)
    wide = dataclasses.replace(case, **{name: tensor[:, :1].expand(tensor.shape)})
    assert getattr(wide, name).stride(1) == 0
    check_forward(wide)
    check_backward(wide)


@pytest.mark.parametrize("name", ["q", "dout"])
def test_expanded_rows(name: str) -> None:
    case = make_backward_case(SHAPE, intervals="causal", seed=2)
    tensor = getattr(case, name)
    wide = dataclasses.replace(case, **{name: tensor[:1].expand(tensor.shape)})
    assert getattr(wide, name).stride(0) == 0
    check_forward(wide)
    check_backward(wide)


def _documents(num_rows: int) -> tuple[Tensor, Tensor]:
    """Causal documents of DOC_LEN, the last one shorter."""
    row = torch.arange(num_rows, dtype=torch.int32)
    return row // DOC_LEN * DOC_LEN, row + 1


def _check_last_document(case: Case, softmax: tuple[Tensor, ...], gradients: list[Tensor]) -> None:
    """The last document and the last KV head against dense fp64 on the GPU."""
    out, lse = softmax
    group = case.q.shape[1] // case.k.shape[1]
    first = int(case.kv_begin[-1])
    q, dout = (x[first:, -group:].double().transpose(0, 1) for x in (case.q, case.dout))
    k, v = (x[first:, -1].double() for x in (case.k, case.v))
    scale = case.softmax_scale
    hidden = torch.ones(len(k), len(k), device="cuda", dtype=torch.bool).triu(1)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    heads: list[tuple[Tensor, Tensor, Tensor]] = []
    for head in range(group):
        scores = (q[head] @ k.T * scale).masked_fill(hidden, -torch.inf)
        p = torch.softmax(scores, dim=1)
        head_out = p @ v
        ds = p * (dout[head] @ v.T - (dout[head] * head_out).sum(dim=1, keepdim=True))
        heads.append((head_out, scores.logsumexp(dim=1), scale * (ds @ k)))
        dk += scale * (ds.T @ q[head])
        dv += p.T @ dout[head]
    expected_out, expected_lse, dq = (torch.stack(x, dim=1) for x in zip(*heads, strict=True))
    assert_matches("out", out[first:, -group:], expected_out, tolerances.CUDA_BF16)
    assert_lse_matches(lse[first:, -group:], expected_lse, tolerances.CUDA_LSE_ABS)
    tolerance = tolerances.CUDA_BACKWARD_BY_DTYPE[torch.bfloat16]
    expected = (dq, dk[:, None], dv[:, None])
    ours = (gradients[0][first:, -group:], gradients[1][first:, -1:], gradients[2][first:, -1:])
    for name, got, wanted in zip(("dq", "dk", "dv"), ours, expected, strict=True):
        assert_matches(name, got, wanted, tolerance)


def _normal(rows: int, heads: int, row_stride: int | None = None) -> Tensor:
    """N(0, 1) in bf16, `[rows, heads, 128]`, rows `row_stride` elements apart."""
    width = heads * 128
    rows_apart = torch.empty((rows, row_stride or width), dtype=torch.bfloat16, device="cuda")
    values = rows_apart[:, :width]
    values.normal_(generator=torch.Generator("cuda").manual_seed(heads))
    return values.unflatten(1, (heads, 128))


@pytest.mark.parametrize(
    ("rows", "heads", "row_stride"),
    [(129 * DOC_LEN, (16, 2), None), (131200, (2, 1), 16384)],
    ids=["whole tensors", "views"],
)
def test_rows_beyond_2_to_31_elements(
    rows: int, heads: tuple[int, int], row_stride: int | None
) -> None:
    """Of q, dout, out and dq, all in use; the last document lies beyond 2^31 elements."""
    begin, end = _documents(rows)
    case = Case(
        q=_normal(rows, heads[0], row_stride),
        k=_normal(rows, heads[1]),
        v=_normal(rows, heads[1]),
        dout=_normal(rows, heads[0], row_stride),
        kv_begin=begin.cuda(),
        kv_end=end.cuda(),
        softmax_scale=128**-0.5,
    )
    assert int(begin[-1]) * case.q.stride(0) >= 2**31
    out, lse = forward(case)
    dk, dv = (torch.zeros(case.k.shape, device="cuda") for _ in range(2))
    dq = backward(case, lse, attention_delta(case.dout, out), dk, dv)
    _check_last_document(case, (out, lse), [dq, dk, dv])


def test_current_stream() -> None:
    """A side stream is still to write q when the ops are called on it."""
    case = make_backward_case(SHAPE, intervals="staggered", seed=3)
    out, lse = forward(case)
    delta = attention_delta(case.dout, out)

    def gradients(case: Case) -> list[Tensor]:
        dk, dv = torch.zeros(case.k.shape, device="cuda"), torch.zeros(case.v.shape, device="cuda")
        return [backward(case, lse, delta, dk, dv, is_deterministic=True), dk, dv]

    expected = [out, lse, *gradients(case)]
    late = dataclasses.replace(case, q=torch.zeros_like(case.q))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.q.copy_(case.q)
        got = [*forward(late), *gradients(late)]
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
