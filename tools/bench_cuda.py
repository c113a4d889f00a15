"""Speed of the attention ops on a GPU, in turns with torch's cuDNN and FlashAttention-2 backends.

Correctness first: a shape is timed only after its result agrees with cuDNN's and, on a sample of
rows, with fp64. Times are CUDA events, all contestants in turn in each round of one process, as the
card slows under load. TFLOP/s count visible query-key pairs (4 flops per pair, head and head dim).

examples:
  python tools/bench_cuda.py
  python tools/bench_cuda.py --only c16 f16 --rounds 20 --json out.json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.layout import build_layout
from megatron_splitkv.ops import WorkLists, merge_partials_, partial_attention
from megatron_splitkv.plan import make_plan

# 4096 flops per clock and SM, 132 SMs, at the clock seen under load: no faster run is believed.
MAX_TFLOPS = 880.0
# Two 16-bit results differ by both roundings and both roundings of the probabilities.
GATE_REL_L2 = 6e-3
NUM_SAMPLED_ROWS = 8
WARM_UP_ROUNDS = 2
PAUSE_CYCLES = 8_000_000  # 4 ms, longer than it takes to queue a round
CONTESTANTS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
# Lengths of documents as packed training sees them: few long ones, many short ones.
PILE_LENS = (
    [32768] + [8192] * 2 + [4096] * 2 + [2048] * 2 + [1024] * 2 + [512] * 2 + [256] * 2
    + [128] * 3 + [64] * 2
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One line of the table."""

    name: str
    rows: int
    keys: int
    heads: tuple[int, int]
    head_dim: int = 128
    head_dim_v: int = 128
    mask: str = "full"  # or causal, packed, scattered
    dtype: torch.dtype = torch.bfloat16


SHAPES = [
    Shape(name="c16", rows=16384, keys=16384, heads=(16, 16), mask="causal"),
    Shape(name="f16", rows=16384, keys=16384, heads=(16, 16)),
    Shape(name="c16fp16", rows=16384, keys=16384, heads=(16, 16), mask="causal",
          dtype=torch.float16),
    Shape(name="c32g", rows=32768, keys=32768, heads=(32, 8), mask="causal"),
    Shape(name="cp8k", rows=8192, keys=131072, heads=(32, 4)),
    Shape(name="q512", rows=512, keys=131072, heads=(32, 8)),
    Shape(name="q256", rows=256, keys=131072, heads=(32, 8)),
    Shape(name="q128", rows=128, keys=131072, heads=(32, 8)),
    Shape(name="q16", rows=16, keys=131072, heads=(32, 8)),
    Shape(name="h64c", rows=16384, keys=16384, heads=(32, 32), head_dim=64, head_dim_v=64,
          mask="causal"),
    Shape(name="mla", rows=16384, keys=16384, heads=(16, 16), head_dim=192, mask="causal"),
    Shape(name="h256c", rows=16384, keys=16384, heads=(8, 8), head_dim=256, head_dim_v=256,
          mask="causal"),
    Shape(name="pile", rows=65536, keys=65536, heads=(32, 8), mask="packed"),
    Shape(name="scattered", rows=32768, keys=8192, heads=(32, 8), mask="scattered"),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measured contestant; `rate` in TFLOP/s, or GB/s for the merge."""

    shape: str
    contestant: str
    median_ms: float
    min_ms: float
    max_ms: float
    rate: float


def make_intervals(shape: Shape) -> tuple[Tensor, Tensor]:
    """`kv_begin`, `kv_end` on the CPU."""
    if shape.mask == "full":
        end = torch.full((shape.rows,), shape.keys)
        return torch.zeros_like(end).int(), end.int()
    if shape.mask == "causal":
        end = torch.arange(1, shape.rows + 1)
        return torch.zeros_like(end).int(), end.int()
    lens = [65536 - sum(PILE_LENS[1:]), *PILE_LENS[1:]]
    if shape.mask == "scattered":
        # What rank 3 of 8 computes for the rows of the others, over its blocks of 512 keys.
        plan = make_plan(lens, 8, block_size=512, tolerance=0.0)
        gathered = build_layout(plan, 3).stages[0].intervals
        return gathered.begin, gathered.end
    counts = torch.tensor(lens)
    ends = counts.cumsum(0)
    begin = torch.repeat_interleave(ends - counts, counts)
    return begin.int(), torch.arange(1, shape.rows + 1).int()


class Problem:
    """Inputs in our layout, THD, and the same values in torch's, BHSD."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(rows: int, heads: int, dim: int) -> Tensor:
            return torch.randn(
                (rows, heads, dim), generator=generator, device="cuda", dtype=torch.float32
            ).to(shape.dtype)

        heads_q, heads_kv = shape.heads
        self.q = normal(shape.rows, heads_q, shape.head_dim)
        self.k = normal(shape.keys, heads_kv, shape.head_dim)
        self.v = normal(shape.keys, heads_kv, shape.head_dim_v)
        begin, end = make_intervals(shape)
        if len(begin) != shape.rows or int(end.max()) > shape.keys:
            raise SystemExit(f"{shape.name} has {len(begin)} rows, {int(end.max())} keys")
        self.work = WorkLists(begin, end)
        self.begin, self.end = begin.cuda(), end.cuda()
        self.num_pairs = int((end.long() - begin.long()).clamp(min=0).sum()) * heads_q
        self.bhsd = [x.transpose(0, 1)[None].contiguous() for x in (self.q, self.k, self.v)]

    @property
    def tflop(self) -> float:
        return 2e-12 * (self.shape.head_dim + self.shape.head_dim_v) * self.num_pairs

    def ours(self, out_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return partial_attention(
            self.q,
            self.k,
            self.v,
            self.begin,
            self.end,
            softmax_scale=self.shape.head_dim**-0.5,
            out_dtype=out_dtype,
            work=self.work,
        )

    def torch_backend(self, backend: SDPBackend) -> Tensor:
        q, k, v = self.bhsd
        is_causal = self.shape.mask == "causal"
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    def check(self) -> float:
        """Largest rel-L2 error of sampled rows against fp64."""
        out, _ = self.ours()
        group = self.shape.heads[0] // self.shape.heads[1]
        worst = 0.0
        generator = torch.Generator().manual_seed(1)
        for row in torch.randint(self.shape.rows, (NUM_SAMPLED_ROWS,), generator=generator):
            seen = slice(int(self.begin[row]), int(self.end[row]))
            if seen.start >= seen.stop:
                continue
            head = int(torch.randint(self.shape.heads[0], (1,), generator=generator))
            k, v = (x[seen, head // group].double() for x in (self.k, self.v))
            scores = k @ self.q[row, head].double() * self.shape.head_dim**-0.5
            expected = torch.softmax(scores, dim=0) @ v
            error = (out[row, head].double() - expected).norm() / expected.norm()
            worst = max(worst, float(error))
        if not worst <= GATE_REL_L2:
            raise SystemExit(f"{self.shape.name}: rel-L2 {worst:.3g} > {GATE_REL_L2:.3g}")
        return worst


def on_sm80(call: Callable[[], object]) -> Callable[[], object]:
    """The call with the kernels that every card since compute capability 8.0 runs."""

    def run() -> object:
        _kernels.force_cuda_family("sm80")
        try:
            return call()
        finally:
            _kernels.force_cuda_family("auto")

    return run


def time_in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, after two rounds of warm-up.

    Every round queues its calls behind a pause of the GPU, so that none waits for the host, and
    starts with another contestant, so that none is always first.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + WARM_UP_ROUNDS):
        spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda._sleep(PAUSE_CYCLES)  # pyright: ignore[reportPrivateUsage]
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[name]()
            end.record()
            spans.append((name, start, end))
        torch.cuda.synchronize()
        if turn >= WARM_UP_ROUNDS:
            for name, start, end in spans:
                times[name].append(start.elapsed_time(end))
    return times


def lines_of(shape: str, times: dict[str, list[float]], amount: float) -> list[Line]:
    """Medians and rates; `amount` in TFLOP or TB."""
    lines: list[Line] = []
    for name, ms in times.items():
        rate = amount / (statistics.median(ms) * 1e-3)
        line = Line(
            shape=shape,
            contestant=name,
            median_ms=statistics.median(ms),
            min_ms=min(ms),
            max_ms=max(ms),
            rate=rate,
        )
        if rate > MAX_TFLOPS:
            raise SystemExit(f"{shape} {name}: {rate:.0f} is faster than the card can be")
        lines.append(line)
    return lines


def bench_shape(shape: Shape, rounds: int) -> list[Line]:
    """Our forward in turns with torch's backends, where they can run the shape."""
    problem = Problem(shape)
    problem.check()
    on_sm80(problem.check)()
    calls: dict[str, Callable[[], object]] = {
        "ours": problem.ours,
        "ours 16-bit out": partial(problem.ours, shape.dtype),
        "ours sm80": on_sm80(problem.ours),
    }
    if shape.mask in ("full", "causal"):
        for name, backend in CONTESTANTS.items():
            call = partial(problem.torch_backend, backend)
            try:
                call()
            except RuntimeError as error:
                print(f"{shape.name}: {name} cannot run it: {str(error).splitlines()[0]}")
            else:
                calls[name] = call
    return lines_of(shape.name, time_in_turns(calls, rounds), problem.tflop)


def bench_merge(dtype: torch.dtype, rounds: int) -> list[Line]:
    """Merge of 8 partials, 16K rows x 32 heads x 128, against a copy of as many bytes."""
    rows, heads, dim, parts = 16384, 32, 128, 8
    part_out = torch.randn(rows * parts, heads, dim, device="cuda", dtype=dtype)
    part_lse = torch.randn(rows * parts, heads, device="cuda")
    slots = (
        torch.arange(parts, device="cuda")[None] * rows + torch.arange(rows, device="cuda")[:, None]
    )
    ptr = torch.arange(rows + 1, device="cuda").int() * parts
    slots = slots.flatten().int()
    out = torch.zeros(rows, heads, dim, device="cuda")
    lse = torch.full((rows, heads), -torch.inf, device="cuda")
    num_bytes = part_out.nbytes + part_lse.nbytes + 2 * (out.nbytes + lse.nbytes)
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: merge_partials_(out, lse, part_out, part_lse, ptr, slots),
        "copy": lambda: target.copy_(source),
    }
    name = f"merge 8 x {str(dtype).removeprefix('torch.')}"
    return lines_of(name, time_in_turns(calls, rounds), num_bytes * 1e-12)


def print_table(lines: list[Line]) -> None:
    """The report for people."""
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("shape", "contestant", "ms: median (min - max)", "TFLOP/s or TB/s", "ours / it"):
        table.add_column(column, justify="left" if column in ("shape", "contestant") else "right")
    ours = {line.shape: line for line in lines if line.contestant == "ours"}
    for line in lines:
        span = f"{line.median_ms:.3f} ({line.min_ms:.3f} - {line.max_ms:.3f})"
        ratio = line.median_ms / ours[line.shape].median_ms
        table.add_row(line.shape, line.contestant, span, f"{line.rate:.4g}", f"{ratio:.3f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Checks, measures, reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--only", nargs="+", choices=[*names, "merge"], help="default: all")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args(arguments)
    wanted = args.only or [*names, "merge"]
    lines: list[Line] = []
    with torch.no_grad():
        for shape in SHAPES:
            if shape.name in wanted:
                lines += bench_shape(shape, args.rounds)
        if "merge" in wanted:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                lines += bench_merge(dtype, args.rounds)
    print_table(lines)
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
