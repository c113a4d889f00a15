"""Speed of the attention ops beside the libraries that can be had, on a GPU or on the CPU.

Beside ours run, on a GPU: torch's cuDNN and FlashAttention-2, FlashAttention-3 if its
`flash_attn_interface` is installed, and our sm80 kernels; on the CPU: torch's attention.
Correctness first: a contestant is timed on a shape only after sampled rows and keys agree with
fp64. All are timed in turns in one process, as a GPU slows under load; times are CUDA events, or
CPU time of the process. TFLOP/s count visible query-key pairs: 2 flop for each head dim of q . k
and of p . v, and of the five products of the backward.

Our backward includes delta and clearing dq, which stays fp32, where libraries round it. "ours"
writes dk and dv in the dtype of the inputs, as libraries do and as attention does where one call
is all; "ours fp32" writes them in fp32, as it does for its own rows when those of other ranks are
to follow; "ours accumulating" adds these.

examples:
  python tools/bench_ops.py --json ops.json --markdown ops.md
  python tools/bench_ops.py --shapes c16 q128 merge-bf16 --without "ours sm80" fa2
  python tools/bench_ops.py --device cpu --shapes 64x16K,32/4,fp32 --ops forward
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from device_info import describe_device, in_words
from ops_contestants import Contestant, FlashAttention3, Problem, contestants
from ops_gate import Sample
from ops_merge import bench_merge
from ops_report import beside_aims, markdown
from ops_shapes import CPU_SHAPES, CUDA_SHAPES, SHAPES, MergeShape, Shape, parse_shape
from ops_timing import Line, believable_tflops, lines_of, time_in_turns

from megatron_splitkv.checks.options import output_file, positive_int
from megatron_splitkv.checks.processes import choose_device

DEFAULT_ROUNDS = {"cuda": 10, "cpu": 7}
START = time.perf_counter()


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add("--shapes", nargs="+", type=parse_shape, metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}, or as in 512x128K,32/8,causal,hd128,bf16 (default: those "
        "of the device)")  # fmt: skip
    add("--ops", nargs="+", choices=("forward", "backward", "merge"),
        default=["forward", "backward", "merge"], help="(default: all)")  # fmt: skip
    add("--without", nargs="+", default=[], metavar="NAME", help="contestants to leave out")
    add("--rounds", type=positive_int, metavar="N",
        help="timed rounds (default: 10 on a GPU, 7 on the CPU)")  # fmt: skip
    add("--threads", type=positive_int, default=1, metavar="N",
        help="CPU threads (default: %(default)s)")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="also write the figures to this file")
    add("--markdown", type=output_file, metavar="FILE", help="also write the tables to this file")
    return parser


class Bench:
    """Runs shapes one after the other and keeps what came out.

    Attributes:
        lines: what was timed.
        notes: who did not run what, and why.
        errors: worst error of each contestant, shape and op, beside fp64.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.rounds: int = args.rounds or DEFAULT_ROUNDS[device.type]
        self.all = [c for c in contestants(device) if c.name not in args.without]
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.errors: dict[str, float] = {}

    def run(self, shape: Shape | MergeShape) -> None:
        """Checks and times one shape."""
        if isinstance(shape, MergeShape):
            if "merge" in self.args.ops:
                self.lines += bench_merge(shape, self.rounds, self.device)
                say(f"{shape.name}: merge")
            return
        ops = [op for op in ("forward", "backward") if op in self.args.ops]
        if not ops:
            return
        problem = Problem(shape, self.device)
        sample = Sample(problem)
        self._refuse_wrong("ours", shape, "lse", sample.forward_error(*problem.attended), sample)
        runners = self._runners(shape)
        for op in ops:
            calls = dict[str, Callable[[], object]]()
            for contestant in runners:
                if op in contestant.ops:
                    call = self._checked_call(contestant, op, problem, sample)
                    if call is not None:
                        calls[contestant.name] = call
            times = time_in_turns(calls, self.rounds, self.device)
            self._keep(shape, op, times, shape.flop(op, problem.num_pairs))

    def _keep(self, shape: Shape, op: str, times: Mapping[str, list[float]], flop: float) -> None:
        """Turns times into lines, and names who has none."""
        limit = believable_tflops(self.device)
        lines = lines_of(shape.name, op, times, flop, highest_rate=limit)
        self.lines += lines
        for name in times.keys() - {line.contestant for line in lines}:
            self.notes.append(
                f"{shape.name}: every round of {name} {op} is beyond {limit:.0f} TFLOP/s, which "
                "this GPU cannot reach; none is believed"
            )
        say(f"{shape.name}: {op} of {', '.join(times)}")

    def _runners(self, shape: Shape) -> list[Contestant]:
        refusals = [(c, c.refusal(shape)) for c in self.all]
        runners = [c for c, refusal in refusals if refusal is None]
        names = {c.name for c in runners}
        for contestant, refusal in refusals:
            if refusal is not None and contestant.name not in names:
                names.add(contestant.name)
                self.notes.append(f"{shape.name}: {contestant.name} {refusal}")
        return runners

    def _checked_call(
        self, contestant: Contestant, op: str, problem: Problem, sample: Sample
    ) -> Callable[[], object] | None:
        """The call to be timed, once its result is right; None if it cannot run or is wrong."""
        shape = problem.shape
        if contestant.is_ours:
            filler = 0.0 if contestant.accumulates else torch.nan
            for gradient in problem.key_gradients(is_rounded=contestant.is_rounded):
                gradient.fill_(filler)
        try:
            if op == "forward":
                forward = contestant.forward(problem)
                call, error = forward, sample.forward_error(forward())
            else:
                backward = contestant.backward(problem)
                call, error = backward, sample.backward_error(backward())
        except RuntimeError as failure:
            if contestant.is_ours:
                raise
            reason = str(failure).splitlines()[0]
            self.notes.append(f"{shape.name}: {contestant.name} cannot run {op}: {reason}")
            return None
        if contestant.is_ours:
            self._refuse_wrong(contestant.name, shape, op, error, sample)
        elif not error <= sample.limit:
            self.notes.append(f"{shape.name}: {contestant.name} {op} is wrong, error {error:.3g}")
            return None
        self.errors[f"{shape.name} {op} {contestant.name}"] = error
        return call

    @staticmethod
    def _refuse_wrong(name: str, shape: Shape, op: str, error: float, sample: Sample) -> None:
        if not error <= sample.limit:
            raise SystemExit(
                f"bench_ops.py: {shape.name}: {op} of {name} differs from fp64 by {error:.3g}, "
                f"the limit is {sample.limit:g}; it is not timed"
            )


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def describe(device: torch.device) -> dict[str, str]:
    """Hardware and versions, for the head of the report."""
    about = describe_device(device)
    fa3 = FlashAttention3()
    if device.type == "cuda" and fa3.module is not None:
        about["FlashAttention-3"] = f"without {', '.join(fa3.left_out()) or 'nothing'}"
    return about


def report(bench: Bench, about: dict[str, str]) -> str:
    """Writes the files, returns the text."""
    text = f"{in_words(about)}; {bench.rounds} rounds\n\n"
    text += markdown(bench.lines, bench.notes, bench.device.type) + "\n"
    if bench.args.markdown:
        bench.args.markdown.write_text(text)
    if bench.args.json:
        reached = [
            {**asdict(r.aim), "by": r.by, "value": r.value, "verdict": r.verdict}
            for r in beside_aims(bench.lines)
        ]
        figures = {
            "about": about, "command": sys.argv, "rounds": bench.rounds,
            "lines": [asdict(line) for line in bench.lines], "aims": reached,
            "errors": bench.errors, "notes": bench.notes,
        }  # fmt: skip
        bench.args.json.write_text(json.dumps(figures, indent=1))
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, measures, reports."""
    args = build_parser().parse_args(argv)
    try:
        device = choose_device(args.device, 0)
    except ValueError as error:
        print(f"bench_ops.py: error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    bench = Bench(args, device)
    about = describe(device)
    text = ""
    with torch.no_grad():
        for shape in args.shapes or (CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES):
            bench.run(shape)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            text = report(bench, about)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
