"""The kernels of this machine's device against the fp64 oracle. No ranks, no communication."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_splitkv.checks import limits
from megatron_splitkv.checks.oracle import (
    Expected,
    dense_attention,
    error_of,
    interval_mask,
    lse_error,
)
from megatron_splitkv.checks.table import Check
from megatron_splitkv.checks.worst import Worst
from megatron_splitkv.ops import (
    WorkLists,
    merge_partials_,
    partial_attention,
    partial_attention_backward,
)
from megatron_splitkv.ops import cuda as cuda_ops

NUM_ROWS, NUM_KEYS = 261, 517  # no multiple of any tile
SHORT_ROWS = 5  # few enough that the keys of one tile are split
HEADS = ((4, 4), (4, 1), (6, 2))  # multi-head, multi-query, groups of three
CPU_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (40, 72))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One call of the ops.

    Attributes:
        mask: name of the mask, for notes.
        begin, end: key interval of each row, int32 on the CPU.
        heads: query and kv heads.
        head_dims: of q and k, and of v.
        dtype: of q, k, v and dout.
    """

    mask: str
    begin: Tensor
    end: Tensor
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: torch.dtype

    def __str__(self) -> str:
        (heads_q, heads_kv), (dim, dim_v) = self.heads, self.head_dims
        return f"{self.mask}, heads {heads_q}/{heads_kv}, dims {dim}/{dim_v}"


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """What the kernels of a device take."""
    if device.type == "cuda":
        return cuda_ops.DTYPES
    return (torch.float32, torch.bfloat16, torch.float16)


def check_ops(device: torch.device) -> list[Check]:
    """Forward, backward and merge in every dtype and head dim of the device's kernels.

    Args:
        device: where the kernels run.
    Returns:
        For each dtype the worst case of out, lse, dq, dk and dv, and of a merge.
    """
    return [check for dtype in dtypes_of(device) for check in _check_dtype(dtype, device)]


def section_of(dtype: torch.dtype, device: torch.device) -> str:
    """Title of the checks of a dtype; the same on ranks that have a GPU each."""
    return f"ops on {device.type}, {str(dtype).removeprefix('torch.')}"


def _check_dtype(dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    section = section_of(dtype, device)
    worst = Worst(section)
    num_cases = 0
    for case in _cases(dtype, device):
        num_cases += 1
        q, k, v, dout = _inputs(case)
        mask = interval_mask(case.begin, case.end, len(k))
        scale = case.head_dims[0] ** -0.5
        expected = dense_attention(q, k, v, dout, mask, softmax_scale=scale)
        q, k, v, dout = (tensor.to(device) for tensor in (q, k, v, dout))
        work = WorkLists(case.begin, case.end)
        begin, end = case.begin.to(device), case.end.to(device)
        out, lse = partial_attention(q, k, v, begin, end, softmax_scale=scale, work=work)
        worst.see("out", case, out, expected.out, limits.op_limit("out", dtype, device))
        worst.see_lse(case, lse_error(lse, expected.lse), limits.lse_limit(device))
        gradients = _backward(case, (q, k, v, dout), expected, work)
        limit = limits.op_limit("gradient", dtype, device)
        for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
            worst.see(name, case, got, getattr(expected, name), limit)
    yield from worst.checks(f"worst of {num_cases} cases")
    yield _check_merge(section, dtype, device)


def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[OpCase]:
    dims: Sequence[tuple[int, int]] = CPU_HEAD_DIMS
    if device.type == "cuda":
        dims = cuda_ops.HEAD_DIMS
    masks = list(_masks())
    for index, head_dims in enumerate(dims):
        # All masks with each head dim, head counts in turn: every pair of neighbours is met.
        for turn, (mask, begin, end) in enumerate(masks):
            heads = HEADS[(index + turn) % len(HEADS)]
            yield OpCase(
                mask=mask, begin=begin, end=end, heads=heads, head_dims=head_dims, dtype=dtype
            )


def _masks() -> Iterator[tuple[str, Tensor, Tensor]]:
    rows = torch.arange(NUM_ROWS, dtype=torch.int32)
    first = NUM_KEYS - NUM_ROWS
    zero = torch.zeros_like(rows)
    yield "causal", zero, rows + first + 1
    yield "window", (rows + first - 63).clamp_min(0), rows + first + 1
    lens = torch.tensor([100, 1, 30, 130])
    starts = (lens.cumsum(0) - lens).repeat_interleave(lens).int()
    yield "packed documents", starts, rows + 1
    generator = torch.Generator().manual_seed(3)
    bounds = torch.randint(0, NUM_KEYS + 1, (2, NUM_ROWS), generator=generator).int()
    is_empty = rows % 3 == 1
    end = torch.where(is_empty, bounds.amin(0), bounds.amax(0))
    yield "scattered, empty rows", bounds.amin(0), end
    short = torch.zeros(SHORT_ROWS, dtype=torch.int32)
    yield "few rows", short, torch.full_like(short, NUM_KEYS)


def _inputs(case: OpCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(case.mask) + case.head_dims[0])
    rows, (heads_q, heads_kv), (dim, dim_v) = len(case.begin), case.heads, case.head_dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    return (
        normal(rows, heads_q, dim), normal(NUM_KEYS, heads_kv, dim),
        normal(NUM_KEYS, heads_kv, dim_v), normal(rows, heads_q, dim_v),
    )  # fmt: skip


def _backward(
    case: OpCase,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    expected: Expected,
    work: WorkLists,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the oracle's lse and delta, so that a fault of the forward stays there."""
    q, k, v, dout = tensors
    device = q.device
    delta = (dout.cpu().double() * expected.out).sum(-1).float().to(device)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    dq = partial_attention_backward(
        dout, q, k, v, expected.lse.float().to(device), delta,
        case.begin.to(device), case.end.to(device), dk, dv,
        softmax_scale=case.head_dims[0] ** -0.5, work=work,
    )  # fmt: skip
    return dq, dk, dv


def _check_merge(section: str, dtype: torch.dtype, device: torch.device) -> Check:
    """Three partials over disjoint thirds of the keys, empty for many rows, merged into one."""
    begin, end = next((b, e) for name, b, e in _masks() if name.startswith("scattered"))
    case = OpCase(mask="merge", begin=begin, end=end, heads=(4, 2), head_dims=(64, 64), dtype=dtype)
    q, k, v, dout = _inputs(case)
    scale = 64**-0.5
    expected = dense_attention(
        q, k, v, dout, interval_mask(begin, end, len(k)), softmax_scale=scale
    )
    q, k, v = (tensor.to(device) for tensor in (q, k, v))
    edges = [0, NUM_KEYS // 3, 2 * NUM_KEYS // 3, NUM_KEYS]
    parts: list[tuple[Tensor, Tensor]] = []
    for low, high in pairwise(edges):
        low_end = end.clamp(low, high) - low
        low_begin = (begin.clamp(low, high) - low).clamp_max(low_end)
        parts.append(
            partial_attention(
                q, k[low:high], v[low:high], low_begin.to(device), low_end.to(device),
                softmax_scale=scale, work=WorkLists(low_begin, low_end),
            )
        )  # fmt: skip
    out, lse = parts[0]
    part_out, part_lse = (torch.cat([parts[i][j] for i in (1, 2)]) for j in (0, 1))
    ptr = torch.arange(0, 2 * len(q) + 1, 2, dtype=torch.int32, device=device)
    slots = torch.stack([torch.arange(len(q)), torch.arange(len(q)) + len(q)], 1).flatten()
    merge_partials_(out, lse, part_out, part_lse, ptr, slots.int().to(device))
    error = error_of(out, expected.out)
    limit = limits.op_limit("out", dtype, device)
    note = "" if lse_error(lse, expected.lse) <= limits.lse_limit(device) else "lse differs"
    value = error.rel_l2 if not note else float("inf")
    return Check(section=section, name="merge", value=value, limit=limit.rel_l2, note=note)
