"""The op cases of the CPU tests, on a GPU."""

import dataclasses

import torch
from torch import Tensor

from megatron_splitkv.ops import WorkLists, partial_attention
from tests import tolerances
from tests.ops.cases import Case, Intervals, Shape, make_case
from tests.oracle import Oracle, assert_lse_matches, assert_matches, attend, mask_from_intervals

HIDDEN_VALUE = 1e4  # large and finite: values of keys that no row sees must be finite on CUDA


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
