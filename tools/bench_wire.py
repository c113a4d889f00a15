"""Error of each wire format of partials against fp64, at 1, 2, 4 and 8 simulated ranks.

One document. Under a full mask every rank has an equal share in each row, the hardest case.
`out` and `dq` of sampled rows are compared with dense fp64 attention on the
same inputs, rounded to --dtype. On a GPU the format's own passes are timed too: encoding partials
into wire rows, merging and adding them.

examples:
  python tools/bench_wire.py --length 4096 --mask full
  python tools/bench_wire.py --device cuda --json out.json
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.checks.options import output_file, positive_int
from megatron_splitkv.comm import RowFormat, ThreadGroup, ThreadTransport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout, shard_rows, unshard_rows
from megatron_splitkv.ops import attention_delta
from megatron_splitkv.ops.add import run_add
from megatron_splitkv.ops.merge import run_merge
from megatron_splitkv.plan import Causal, Full, make_plan
from megatron_splitkv.plan.queries import SelfQueries
from megatron_splitkv.wire import PartialFormat

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("fp32", "bf16", "fp16")
CP_SIZES = (1, 2, 4, 8)
NUM_SAMPLED_ROWS = 64
LIMIT = 1.25  # times the error of one rank: what a default may cost
TIMED_ROWS, TIMED_HEADS, TIMED_PARTS = 16384, 32, 7  # a rank of 8, fully streamed
ROUNDS = 20
PAUSE_CYCLES = 2_000_000  # 1 ms, longer than it takes to queue a pass


class Pass(NamedTuple):
    """One pass over memory: its name, the bytes moved for each element of out, and the call."""

    name: str
    bytes_each: int
    call: Callable[[], object]


def dense_fp64(inputs: list[Tensor], rows: Tensor, queries: SelfQueries) -> tuple[Tensor, Tensor]:
    """out and dq of the given rows of one document, `[R, Hq, D]`."""
    q, k, v, dout = (tensor.double().cpu() for tensor in inputs)
    num_heads_q, num_heads_kv = q.shape[1], k.shape[1]
    q, dout = q[rows], dout[rows]
    scale = q.shape[-1] ** -0.5
    out, dq = torch.empty_like(q), torch.empty_like(q)
    last = rows if isinstance(queries, Causal) else torch.full_like(rows, len(k))
    is_hidden = torch.arange(len(k))[None] > last[:, None]
    for head in range(num_heads_q):
        keys, values = (x[:, head * num_heads_kv // num_heads_q] for x in (k, v))
        scores = (q[:, head] @ keys.T * scale).masked_fill(is_hidden, -torch.inf)
        probs = torch.softmax(scores, -1)
        out[:, head] = probs @ values
        dprobs = dout[:, head] @ values.T
        ds = probs * (dprobs - (dprobs * probs).sum(-1, keepdim=True)) * scale
        dq[:, head] = ds @ keys
    return out, dq


def run_ranks(
    inputs: list[Tensor], queries: SelfQueries, cp_size: int, partial_dtype: str, device: str
) -> tuple[Tensor, Tensor]:
    """out and dq of all rows, from `cp_size` ranks that exchange partials in a format."""
    config = SplitKVConfig(partial_dtype=partial_dtype, num_stages=max(1, cp_size - 1))
    plan = make_plan([len(inputs[0])], cp_size, queries=queries, route=config.route)

    def body(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        layout = build_layout(plan, transport.rank, num_stages=config.num_stages)
        index = layout.kv_index.to(device)
        q, k, v, dout = (shard_rows(tensor, index) for tensor in inputs)
        context = SplitKVContext(
            layout=layout.to(device), transport=transport if cp_size > 1 else None, config=config
        )
        q.requires_grad_()
        out, _ = splitkv_attention(q, k, v, context)
        (dq,) = torch.autograd.grad(out, q, dout)
        return out.detach(), dq

    outs, dqs = zip(*ThreadGroup(cp_size, device=device).run(body), strict=True)
    return unshard_rows(outs, plan).cpu(), unshard_rows(dqs, plan).cpu()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


def measure_errors(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """For each format the errors of out and dq at `CP_SIZES`."""
    heads_q, heads_kv = args.heads
    generator = torch.Generator().manual_seed(17)
    inputs = [
        torch.randn(args.length, heads, args.head_dim, generator=generator)
        .to(DTYPES[args.dtype])
        .to(args.device)
        for heads in (heads_q, heads_kv, heads_kv, heads_q)
    ]
    rows = torch.randperm(args.length, generator=generator)[:NUM_SAMPLED_ROWS].sort().values
    queries = Causal() if args.mask == "causal" else Full()
    expected = dense_fp64(inputs, rows, queries)
    found: dict[str, dict[str, list[float]]] = {}
    for partial_dtype in FORMATS:
        found[partial_dtype] = {"out": [], "dq": []}
        for cp_size in CP_SIZES:
            got = run_ranks(inputs, queries, cp_size, partial_dtype, args.device)
            for name, mine, theirs in zip(("out", "dq"), got, expected, strict=True):
                found[partial_dtype][name].append(relative_error(mine[rows], theirs))
    return found


def error_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """Errors in units of 1e-3, and the ratio that decides."""
    table = Table("format", "of", *(f"cp {size}" for size in CP_SIZES), "cp 8 / cp 1", "holds")
    for partial_dtype, errors in found.items():
        for name, values in errors.items():
            ratio = values[-1] / values[0]
            figures = [f"{value * 1e3:.4f}" for value in values]
            table.add_row(
                partial_dtype, name, *figures, f"{ratio:.3f}", "yes" if ratio <= LIMIT else "no"
            )
    table.title = "relative L2 error, in 1e-3"
    return table


def timed_passes(head_dim: int) -> Iterator[Pass]:
    """Each pass over memory that Split-KV adds to attention."""
    shape = (TIMED_ROWS, TIMED_HEADS, head_dim)
    out, lse = torch.randn(shape, device="cuda"), torch.randn(shape[:2], device="cuda")
    q = out.bfloat16()
    index = torch.randperm(TIMED_ROWS, device="cuda")
    query_format = RowFormat(((shape[1:], q.dtype),))
    yield Pass("pack chosen rows of q", 4, partial(query_format.pack, [q], index))
    yield Pass("pack all rows of q", 4, partial(query_format.pack, [q]))
    yield Pass("delta", 4, partial(attention_delta, q, q))
    ptr = torch.arange(TIMED_ROWS + 1, device="cuda", dtype=torch.int32) * TIMED_PARTS
    slots = torch.arange(TIMED_PARTS * TIMED_ROWS, device="cuda", dtype=torch.int32)
    slots = slots.view(TIMED_PARTS, TIMED_ROWS).T.flatten()
    for name in FORMATS:
        wire = PartialFormat(
            partial_dtype=name, num_heads=TIMED_HEADS, dims=(head_dim,), has_lse=True
        )
        values, size = out.to(wire.compute_dtype), DTYPES[name].itemsize
        yield Pass(f"encode {name}", values.itemsize + size, partial(wire.pack, [values], lse))
        packed = wire.pack([values], lse).repeat(TIMED_PARTS, 1)  # alive as long as its passes
        (part,) = wire.unpack(packed)
        assert part.lse is not None
        moved, csr = TIMED_PARTS * size + 8, (ptr, slots, part.scale)
        merge = partial(run_merge, out.clone(), lse.clone(), part.values, part.lse, *csr)
        yield Pass(f"merge {TIMED_PARTS} of {name}", moved, merge)
        add = partial(run_add, out.clone(), part.values, *csr)
        yield Pass(f"add {TIMED_PARTS} of {name}", moved, add)


def time_passes(head_dim: int) -> dict[str, tuple[float, float]]:
    """Median ms and TB/s of each pass on a GPU."""
    found = {}
    for one in timed_passes(head_dim):
        times = []
        for _ in range(ROUNDS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(PAUSE_CYCLES)  # pyright: ignore[reportPrivateUsage]
            begin.record()
            one.call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        ms = statistics.median(times[2:])
        found[one.name] = ms, one.bytes_each * TIMED_ROWS * TIMED_HEADS * head_dim / ms / 1e9
    return found


def main() -> None:
    """Prints the table, and writes the figures where --json says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--length", type=positive_int, default=16384, metavar="N", help=f"tokens {shown}")
    add("--heads", type=positive_int, nargs=2, default=(8, 8), metavar=("Q", "KV"), help=shown)
    add("--head-dim", type=positive_int, default=128, metavar="N", help=shown)
    add("--mask", choices=("causal", "full"), default="causal", help=shown)
    add("--dtype", choices=sorted(DTYPES), default="bf16", help=shown)
    add("--device", choices=("cpu", "cuda"), default="cpu", help=shown)
    add("--json", type=output_file, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    heads_q, heads_kv = args.heads
    if heads_q % heads_kv:
        parser.error(f"--heads {heads_q} {heads_kv}: kv heads must divide query heads")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU")
    found = measure_errors(args)
    Console(width=100).print(error_table(found))
    figures: dict[str, object] = {"cp_sizes": CP_SIZES, "errors": found}
    if args.device == "cuda":
        figures["passes"] = passes = time_passes(args.head_dim)
        table = Table("pass", "ms", "TB/s", title=f"{TIMED_ROWS} rows of {TIMED_HEADS} heads")
        for name, (ms, rate) in passes.items():
            table.add_row(name, f"{ms:.4f}", f"{rate:.2f}")
        Console(width=100).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
