"""Fits what the planner takes kernels to cost, from timings on this device, and stores it as JSON.

Times forward and backward of the partial attention over a grid of query rows, keys and documents,
and fits  time = base + pairs * pair_ns + rows * row_ns + runs * run_ns  with no negative term,
by least squares of the relative error. The link is not measured: its figures are what is given.

examples:
  python tools/calibrate.py --heads 32/8 --link-gb-per-s 380 --output h200.json
  python tools/calibrate.py --device cpu --heads 4/2 --head-dim 64 --dtype fp32 \\
      --link-gb-per-s 5 --output cpu.json
"""

import argparse
import datetime
import itertools
import math
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from megatron_splitkv.ops import (
    WorkLists,
    attention_delta,
    partial_attention,
    partial_attention_backward,
)
from megatron_splitkv.plan.predict import Calibration

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = (1, 4, 16)  # rows and keys of the grid, in units of --smallest
DOCUMENTS = (1, 8, 64)
PAUSE_CYCLES = 4_000_000  # longer than it takes to queue a call
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured point; `ns` is the median of forward and backward together."""

    pairs: int
    rows: int
    runs: int
    ns: float


class Call:
    """Forward and backward over documents of equal rows and keys; each row sees its document."""

    def __init__(self, args: argparse.Namespace, rows: int, keys: int, documents: int) -> None:
        heads_q, heads_kv = args.heads
        device, dtype = torch.device(args.device), DTYPES[args.dtype]
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> Tensor:
            drawn = torch.empty(tokens, heads, args.head_dim, dtype=dtype, device=device)
            return drawn.normal_(generator=generator)

        self.q, self.dout = normal(rows, heads_q), normal(rows, heads_q)
        self.k, self.v = normal(keys, heads_kv), normal(keys, heads_kv)
        document = torch.arange(rows) * documents // rows
        begin = (document * keys // documents).int()
        end = ((document + 1) * keys // documents).int()
        self.work = WorkLists(begin, end)
        self.begin, self.end = begin.to(device), end.to(device)
        self.dk = torch.zeros(self.k.shape, device=device)
        self.dv = torch.zeros(self.v.shape, device=device)
        self.scale = args.head_dim**-0.5
        self.pairs = int((end.long() - begin.long()).sum())
        self.rows, self.runs = rows, documents

    def __call__(self) -> None:
        out, lse = partial_attention(
            self.q, self.k, self.v, self.begin, self.end, softmax_scale=self.scale, work=self.work
        )
        delta = attention_delta(out.to(self.q.dtype), self.dout)
        partial_attention_backward(
            self.dout, self.q, self.k, self.v, lse, delta, self.begin, self.end, self.dk, self.dv,
            softmax_scale=self.scale, work=self.work,
        )  # fmt: skip


def median_ns(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median time of a call, in nanoseconds: of the stream on a GPU, else of the process and by
    thread, so that other load on the machine disturbs it less."""
    times: list[float] = []
    for repeat in range(WARM_UP + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The call is queued before the clock starts.
            torch.cuda._sleep(PAUSE_CYCLES)  # pyright: ignore[reportPrivateUsage]
            begin.record()
            call()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end) * 1e6
        else:
            start = time.process_time_ns()
            call()
            elapsed = (time.process_time_ns() - start) / torch.get_num_threads()
        if repeat >= WARM_UP:
            times.append(elapsed)
    return statistics.median(times)


def measure(args: argparse.Namespace) -> list[Sample]:
    """The grid of rows, keys and documents."""
    device = torch.device(args.device)
    points = list(itertools.product(STEPS, STEPS, DOCUMENTS))
    samples: list[Sample] = []
    for rows, keys, documents in track(
        points, "timing", console=Console(stderr=True), transient=True
    ):
        call = Call(args, rows * args.smallest, keys * args.smallest, documents)
        ns = median_ns(call, device, args.repeats)
        samples.append(Sample(pairs=call.pairs, rows=call.rows, runs=call.runs, ns=ns))
    return samples


def fit(samples: list[Sample]) -> tuple[tuple[float, float, float, float], list[float]]:
    """Base, pair, row and run times in ns, none negative, and the relative error of each sample.

    A term that would be negative is left out, the most negative first, and the rest fitted again.
    """
    terms = np.asarray([[1.0, s.pairs, s.rows, s.runs] for s in samples])
    times = np.asarray([s.ns for s in samples])
    relative = terms / times[:, None]
    kept = list(range(terms.shape[1]))
    while True:
        scale = np.linalg.norm(relative[:, kept], axis=0)
        found = np.linalg.lstsq(relative[:, kept] / scale, np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    factors = np.zeros(terms.shape[1])
    factors[kept] = found / scale
    base, pair, row, run = factors.tolist()
    return (base, pair, row, run), (relative @ factors - 1.0).tolist()


def device_name(device: str) -> str:
    """What was measured."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(models, platform.processor() or platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def source_of() -> str:
    """The command, the commit and the date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    command = shlex.join(["python", "tools/calibrate.py", *sys.argv[1:]])
    return f"{command}; commit {commit or 'unknown'}; {datetime.date.today().isoformat()}"


def parse_heads(text: str) -> tuple[int, int]:
    """Reads `32/8` or `32`."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be query heads / kv heads, as in 32/8")
    heads = int(parts[0]), int(parts[-1])
    if heads[0] % heads[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: kv heads must divide query heads")
    return heads


def parse_size(text: str) -> int:
    """Reads a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default_device, help="cuda, cuda:1, cpu (default: %(default)s)")
    add("--heads", type=parse_heads, default=(32, 8), metavar="HQ/HKV", help="(default: 32/8)")
    add("--head-dim", type=parse_size, default=128, help="of q, k and v (default: %(default)s)")
    add("--dtype", choices=sorted(DTYPES), default="bf16", help="(default: %(default)s)")
    add(
        "--smallest",
        type=parse_size,
        help="fewest rows and keys; the most are 16 times as many (default: 64, on a GPU 1024)",
    )
    add("--repeats", type=parse_size, default=7, help="timed calls a point (default: %(default)s)")
    add(
        "--link-gb-per-s",
        type=float,
        required=True,
        metavar="F",
        help="10^9 bytes a second that a rank sends to its group; given, not measured",
    )
    add("--link-latency-us", type=float, default=20.0, metavar="F", help="(default: %(default)s)")
    add("--output", type=Path, required=True, metavar="PATH", help="JSON file to write")
    return parser


def print_fit(calibration: Calibration, samples: list[Sample], errors: list[float]) -> None:
    """The points with the error of the fit."""
    table = Table("rows", "pairs", "runs", "measured us", "fit error", title=calibration.device)
    for column in table.columns:
        column.justify = "right"
    for sample, error in zip(samples, errors, strict=True):
        table.add_row(
            f"{sample.rows:,}", f"{sample.pairs:,}", f"{sample.runs}", f"{sample.ns / 1e3:,.1f}",
            f"{error:+.1%}",
        )  # fmt: skip
    machine = calibration.machine
    table.caption = (
        f"pair {calibration.pair_ns:.3g} ns, row {calibration.row_ns:.3g} ns "
        f"({machine.row_pairs} pairs), run {calibration.run_ns:.3g} ns ({machine.run_pairs} pairs)"
    )
    Console(highlight=False).print(table)


def check_options(args: argparse.Namespace) -> None:
    """Refuses, before minutes are spent on timing, what the end could not use.

    Raises:
        ValueError: a device that is not there, a folder that is not, or a link that is none.
    """
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    if not args.output.absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: its folder is not there")
    if not 0.0 < args.link_gb_per_s < math.inf:
        raise ValueError(f"--link-gb-per-s {args.link_gb_per_s} must be a number above 0")
    if not 0.0 <= args.link_latency_us < math.inf:
        raise ValueError(f"--link-latency-us {args.link_latency_us} must be a number at least 0")


def calibrate(args: argparse.Namespace) -> None:
    """Measures, fits, writes.

    Raises:
        ValueError: a bad option, or times that no calibration fits.
        OSError: the file cannot be written.
    """
    check_options(args)
    is_gpu = torch.device(args.device).type == "cuda"
    args.smallest = args.smallest or (1024 if is_gpu else 64)
    samples = measure(args)
    (base, pair, row, run), errors = fit(samples)
    calibration = Calibration(
        device=device_name(args.device),
        dtype=args.dtype,
        head_dim=args.head_dim,
        num_heads_q=args.heads[0],
        num_heads_kv=args.heads[1],
        pair_ns=pair,
        row_ns=row,
        run_ns=run,
        base_ns=base,
        worst_error=max(abs(error) for error in errors),
        link_gb_per_s=args.link_gb_per_s,
        link_latency_us=args.link_latency_us,
        source=source_of(),
    )
    args.output.write_text(calibration.to_json() + "\n")
    print_fit(calibration, samples, errors)


def main() -> int:
    """Returns the exit code; bad input is one line."""
    args = build_parser().parse_args()
    try:
        calibrate(args)
    except (ValueError, OSError) as error:
        print(f"calibrate.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
