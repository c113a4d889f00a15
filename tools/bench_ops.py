"""Speed of the attention ops next to torch's own attention, on the CPU.

Correctness first: the run ends if a small case differs from dense fp64 attention. Times are CPU
times of this process, taken in turns with torch's, so that other load on the machine disturbs
both alike; GFLOP/s are per core and count visible query-key pairs only (4 flops per pair and head
dim forward, 10 backward).

examples:
  python tools/bench_ops.py
  python tools/bench_ops.py --rows 64 --keys 16384 --heads 32/4 --dtypes fp32
  python tools/bench_ops.py --head-dim 64 --repeats 15 --json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import merge_partials_, partial_attention, partial_attention_backward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GATE_REL_L2 = 1e-5  # fp32 accumulation on inputs that fp64 gets bit for bit
NUM_PARTIALS = 4  # partials per row in the merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """CPU milliseconds of one call, over the repeats."""

    median_ms: float
    min_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the report; `rate` is GFLOP/s per core, or GB/s for the merge."""

    op: str
    dtype: str
    rate: float
    baseline: str
    baseline_rate: float
    ours: Timing
    theirs: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs in our layout, THD, and the same values in torch's, BHSD."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kv_begin: Tensor
    kv_end: Tensor
    is_causal: bool

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def num_pairs(self) -> int:
        return int((self.kv_end - self.kv_begin).sum()) * self.q.shape[1]

    def forward(self) -> tuple[Tensor, Tensor]:
        tensors = (self.q, self.k, self.v, self.kv_begin, self.kv_end)
        return partial_attention(*tensors, softmax_scale=self.softmax_scale)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        delta = (self.dout * out).sum(dim=-1)
        dk = torch.zeros(self.k.shape)
        dv = torch.zeros(self.v.shape)
        tensors = (self.dout, self.q, self.k, self.v, lse, delta, self.kv_begin, self.kv_end)
        scale = self.softmax_scale
        return partial_attention_backward(*tensors, dk, dv, softmax_scale=scale), dk, dv

    def torch_leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [_to_bhsd(x).to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]

    def torch_forward(self, leaves: list[Tensor]) -> Tensor:
        q, k, v = leaves
        return scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)


def _to_bhsd(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None].contiguous()


def make_problem(args: argparse.Namespace, dtype: torch.dtype, rows: int, keys: int) -> Problem:
    """N(0, 1) inputs. Causal when there are as many rows as keys, else every row sees all keys."""
    heads_q, heads_kv = args.heads
    generator = torch.Generator().manual_seed(0)

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn((tokens, heads, args.head_dim), generator=generator).to(dtype)

    is_causal = rows == keys
    end = torch.arange(1, rows + 1) if is_causal else torch.full((rows,), keys)
    return Problem(
        q=normal(rows, heads_q),
        k=normal(keys, heads_kv),
        v=normal(keys, heads_kv),
        dout=normal(rows, heads_q),
        kv_begin=torch.zeros(rows, dtype=torch.int32),
        kv_end=end.int(),
        is_causal=is_causal,
    )


def check_correctness(args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Largest rel-L2 error of out, dq, dk, dv against dense fp64 attention.

    Raises:
        SystemExit: it is above `GATE_REL_L2`.
    """
    problem = make_problem(args, dtype, 150, 150)
    leaves = problem.torch_leaves(torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        expected_out = problem.torch_forward(leaves)
        grads = torch.autograd.grad(expected_out, leaves, _to_bhsd(problem.dout).double())
    out, lse = problem.forward()
    worst = 0.0
    for got, expected in zip(
        (out, *problem.backward(out, lse)), (expected_out, *grads), strict=True
    ):
        error = _to_bhsd(got).double() - expected.detach()
        worst = max(worst, float(error.norm() / expected.detach().norm()))
    if not worst <= GATE_REL_L2:
        raise SystemExit(f"{dtype}: rel-L2 error {worst:.3g} > {GATE_REL_L2:.3g}, nothing is timed")
    return worst


def time_in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[Timing, Timing]:
    """CPU time of both, one after the other in each repeat, after one warm-up call."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for function, list_ms in zip((ours, theirs), times, strict=True):
            start = time.process_time()
            function()
            if repeat > 0:
                list_ms.append((time.process_time() - start) * 1e3)
    first, second = (
        Timing(median_ms=statistics.median(ms), min_ms=min(ms), max_ms=max(ms)) for ms in times
    )
    return first, second


def bench_attention(args: argparse.Namespace, dtype_name: str) -> list[Result]:
    """Forward and backward against torch's attention."""
    dtype = DTYPES[dtype_name]
    problem = make_problem(args, dtype, args.rows, args.keys)
    leaves = problem.torch_leaves(dtype)
    torch_out = problem.torch_forward(leaves)
    torch_dout = _to_bhsd(problem.dout)
    out, lse = problem.forward()

    def torch_forward() -> None:
        with torch.no_grad():
            problem.torch_forward(leaves)

    def torch_backward() -> None:
        torch.autograd.grad(torch_out, leaves, torch_dout, retain_graph=True)

    forward_gflop = 4e-9 * args.head_dim * problem.num_pairs
    results: list[Result] = []
    for op, gflop, ours, theirs in (
        ("forward", forward_gflop, problem.forward, torch_forward),
        ("backward", 2.5 * forward_gflop, lambda: problem.backward(out, lse), torch_backward),
    ):
        our_time, their_time = time_in_turns(ours, theirs, args.repeats)
        rates = [gflop / (t.median_ms * 1e-3) for t in (our_time, their_time)]
        results.append(_result(op, dtype_name, "torch SDPA", rates, our_time, their_time))
    return results


def bench_merge(args: argparse.Namespace, dtype_name: str) -> Result:
    """Merge against a plain copy that reads and writes as many bytes."""
    rows, heads, dim = args.rows, args.heads[0], args.head_dim
    part_out = torch.randn(rows * NUM_PARTIALS, heads, dim).to(DTYPES[dtype_name])
    part_lse = torch.randn(rows * NUM_PARTIALS, heads)
    slots = torch.arange(NUM_PARTIALS)[None] * rows + torch.arange(rows)[:, None]
    ptr, slots = torch.arange(rows + 1).int() * NUM_PARTIALS, slots.flatten().int()
    out, lse = torch.zeros(rows, heads, dim), torch.full((rows, heads), -torch.inf)
    # Read the partials, read and write the running result.
    num_bytes = part_out.nbytes + part_lse.nbytes + 2 * (out.nbytes + lse.nbytes)
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    our_time, their_time = time_in_turns(
        lambda: merge_partials_(out, lse, part_out, part_lse, ptr, slots),
        lambda: target.copy_(source),
        args.repeats,
    )
    rates = [num_bytes * 1e-6 / t.median_ms for t in (our_time, their_time)]
    return _result("merge", dtype_name, "copy", rates, our_time, their_time)


def _result(
    op: str, dtype: str, baseline: str, rates: list[float], ours: Timing, theirs: Timing
) -> Result:
    return Result(
        op=op,
        dtype=dtype,
        rate=rates[0],
        baseline=baseline,
        baseline_rate=rates[1],
        ours=ours,
        theirs=theirs,
    )


def print_table(args: argparse.Namespace, results: list[Result]) -> None:
    """The report for people."""
    heads_q, heads_kv = args.heads
    mask = "causal" if args.rows == args.keys else "every row sees all keys"
    title = (
        f"{args.rows} rows x {args.keys} keys, {mask}, heads {heads_q}/{heads_kv}, head_dim "
        f"{args.head_dim}, {args.threads} thread(s), {_kernels.current_cpu_isa()}, torch "
        f"{torch.__version__}"
    )
    table = Table(title=title, caption="CPU ms: median (min - max); GFLOP/s per core, merge GB/s")
    for column in ("op", "dtype", "ours", "baseline", "ratio", "ours, ms", "baseline, ms"):
        table.add_column(column, justify="left" if column in ("op", "dtype") else "right")
    for r in results:
        unit = "GB/s" if r.op == "merge" else "GFLOP/s"
        spans = [f"{t.median_ms:.2f} ({t.min_ms:.2f} - {t.max_ms:.2f})" for t in (r.ours, r.theirs)]
        table.add_row(
            r.op,
            r.dtype,
            f"{r.rate:.1f} {unit}",
            f"{r.baseline} {r.baseline_rate:.1f}",
            f"{r.rate / r.baseline_rate:.2f}",
            *spans,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def parse_heads(text: str) -> tuple[int, int]:
    """Reads `32/8` or `32`."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be query heads / kv heads, as in 32/8")
    heads_q, heads_kv = int(parts[0]), int(parts[-1])
    if heads_q % heads_kv:
        raise argparse.ArgumentTypeError(f"{text!r}: kv heads must divide query heads")
    return heads_q, heads_kv


def parse_dtypes(text: str) -> list[str]:
    """Reads `fp32,bf16`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in DTYPES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(DTYPES)}")
    return names


def parse_size(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=parse_size, default=2048, help="query rows (default: %(default)s)")
    add("--keys", type=parse_size, help="keys (default: as many as rows, causal)")
    heads_help = "query heads / kv heads (default: 4/4)"
    add("--heads", type=parse_heads, default=(4, 4), metavar="HQ/HKV", help=heads_help)
    add("--head-dim", type=parse_size, default=128, help="of q, k and v (default: %(default)s)")
    dtypes_help = "of fp32, bf16, fp16 (default: fp32,bf16)"
    add("--dtypes", type=parse_dtypes, default=["fp32", "bf16"], metavar="D1,D2", help=dtypes_help)
    add("--threads", type=parse_size, default=1, help="CPU threads (default: %(default)s)")
    add("--repeats", type=parse_size, default=7, help="timed calls (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of the table")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Checks, measures, reports."""
    args = build_parser().parse_args(arguments)
    args.keys = args.keys or args.rows
    torch.set_num_threads(args.threads)
    errors = {name: check_correctness(args, DTYPES[name]) for name in args.dtypes}
    results = [r for name in args.dtypes for r in bench_attention(args, name)]
    results += [bench_merge(args, name) for name in args.dtypes]
    if args.json:
        settings = {**vars(args), "isa": _kernels.current_cpu_isa(), "torch": torch.__version__}
        report = {"settings": settings, "rel_l2": errors, "results": [asdict(r) for r in results]}
        print(json.dumps(report, indent=2))
    else:
        print_table(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
