"""The merge of partials, timed beside a copy that moves as many bytes."""

import torch
from ops_gate import MAX_ERROR
from ops_shapes import DTYPES, MergeShape
from ops_timing import Line, lines_of, time_in_turns

from megatron_splitkv.ops import merge_partials_

NUM_CHECKED_ROWS = 64


def bench_merge(shape: MergeShape, rounds: int, device: torch.device) -> list[Line]:
    """Partials of each row into a running fp32 result, in turns with a copy.

    Raises:
        SystemExit: the first rows differ from fp64.
    """
    rows, parts = shape.rows, shape.partials
    part_out = torch.randn(rows * parts, shape.heads, shape.head_dim, device=device)
    part_out = part_out.to(DTYPES[shape.dtype])
    part_lse = torch.randn(rows * parts, shape.heads, device=device)
    slots = torch.arange(parts)[None] * rows + torch.arange(rows)[:, None]
    slots = slots.flatten().int().to(device)
    ptr = (torch.arange(rows + 1) * parts).int().to(device)
    out = torch.zeros(rows, shape.heads, shape.head_dim, device=device)
    lse = torch.full((rows, shape.heads), -torch.inf, device=device)

    merge_partials_(out, lse, part_out, part_lse, ptr, slots)
    checked = slots[: NUM_CHECKED_ROWS * parts].long()
    some_lse = part_lse[checked].double().unflatten(0, (-1, parts))
    some_out = part_out[checked].double().unflatten(0, (-1, parts))
    weights = torch.softmax(some_lse, dim=1)
    expected = (weights[..., None] * some_out).sum(dim=1)
    error = float((out[: len(expected)].double() - expected).norm() / expected.norm())
    if not error <= MAX_ERROR["fp32"]:
        raise SystemExit(f"{shape.name}: rel-L2 error {error:.3g}, nothing is timed")

    # Reads the partials, reads and writes the running result.
    num_bytes = part_out.nbytes + part_lse.nbytes + 2 * (out.nbytes + lse.nbytes)
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {
        "ours": lambda: merge_partials_(out, lse, part_out, part_lse, ptr, slots),
        "copy": lambda: target.copy_(source),
    }
    return lines_of(shape.name, "merge", time_in_turns(calls, rounds, device), num_bytes)
