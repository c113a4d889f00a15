"""Speed of the backward on a GPU, in turns with torch's cuDNN and FlashAttention-2 backends.

Correctness first: a shape is timed only after dq of sampled rows and dk, dv of sampled keys agree
with fp64. Times are taken as in bench_cuda.py. TFLOP/s count visible query-key pairs: 2 flops per
pair and head for each of 3 * head_dim_qk + 2 * head_dim_v. Ours includes delta, clearing dq, and
adding to fp32 dk and dv, or writing them where it says overwriting; theirs writes 16-bit gradients.

examples:
  python tools/bench_cuda_backward.py
  python tools/bench_cuda_backward.py --only c16 q128 --rounds 20 --json out.json
  python tools/bench_cuda_backward.py --without "ours sm80" fa2
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from bench_cuda import (
    CONTESTANTS,
    SHAPES,
    Line,
    Problem,
    Shape,
    lines_of,
    make_intervals,
    on_sm80,
    print_table,
    time_in_turns,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron_splitkv.ops import WorkLists, partial_attention_backward
from megatron_splitkv.ops.delta import attention_delta

# Probabilities and ds are rounded to 16 bits, and so is out in delta.
GATE_REL_L2 = 1e-2
NUM_SAMPLES = 6


class BackwardProblem(Problem):
    """The inputs of the forward, its results, and a gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.out, self.lse = self.ours(shape.dtype)
        generator = torch.Generator("cuda").manual_seed(1)
        self.dout = torch.randn(
            self.out.shape, generator=generator, device="cuda", dtype=torch.float32
        ).to(shape.dtype)
        begin, end = make_intervals(shape)
        self.in_order = WorkLists(begin, end, is_deterministic=True)
        self.dk = torch.zeros(self.k.shape, device="cuda")
        self.dv = torch.zeros(self.v.shape, device="cuda")

    @property
    def tflop(self) -> float:
        return 2e-12 * (3 * self.shape.head_dim + 2 * self.shape.head_dim_v) * self.num_pairs

    def gradients(self, work: WorkLists, *, accumulate: bool = True) -> Tensor:
        """Adds to dk and dv or overwrites them, returns dq."""
        return partial_attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            self.lse,
            attention_delta(self.dout, self.out),
            self.begin,
            self.end,
            self.dk,
            self.dv,
            softmax_scale=self.shape.head_dim**-0.5,
            accumulate=accumulate,
            work=work,
        )

    def torch_backward(self, backend: SDPBackend) -> Callable[[], object]:
        """The backward alone, over a graph recorded once."""
        leaves = [x.detach().requires_grad_() for x in self.bhsd]
        q, k, v = leaves
        is_causal = self.shape.mask == "causal"
        with torch.enable_grad(), sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        dout = self.dout.transpose(0, 1)[None].contiguous()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def check_gradients(self, work: WorkLists) -> float:
        """Largest rel-L2 error of sampled rows and keys against fp64."""
        self.dk.zero_()
        self.dv.zero_()
        dq = self.gradients(work)
        generator = torch.Generator().manual_seed(1)
        worst = 0.0
        for _ in range(NUM_SAMPLES):
            row = int(torch.randint(self.shape.rows, (1,), generator=generator))
            key = int(torch.randint(self.shape.keys, (1,), generator=generator))
            head = int(torch.randint(self.shape.heads[0], (1,), generator=generator))
            kv_head = head // (self.shape.heads[0] // self.shape.heads[1])
            pairs = [(dq[row, head], self._dq(row, head))]
            dk, dv = self._dk_dv(key, kv_head)
            pairs += [(self.dk[key, kv_head], dk), (self.dv[key, kv_head], dv)]
            for got, expected in pairs:
                error, norm = float((got.double() - expected).norm()), float(expected.norm())
                worst = max(worst, error / norm if norm > 0 else error)
        if not worst <= GATE_REL_L2:
            raise SystemExit(f"{self.shape.name}: rel-L2 {worst:.3g} > {GATE_REL_L2:.3g}")
        return worst

    def _dq(self, row: int, head: int) -> Tensor:
        scale = self.shape.head_dim**-0.5
        seen = slice(int(self.begin[row]), int(self.end[row]))
        kv_head = head // (self.shape.heads[0] // self.shape.heads[1])
        k, v = (x[seen, kv_head].double() for x in (self.k, self.v))
        if seen.start >= seen.stop:
            return torch.zeros(self.shape.head_dim, device="cuda", dtype=torch.float64)
        p = torch.softmax(k @ self.q[row, head].double() * scale, dim=0)
        dp = v @ self.dout[row, head].double()
        ds = p * (dp - (p * dp).sum())
        return scale * (ds @ k)

    def _dk_dv(self, key: int, kv_head: int) -> tuple[Tensor, Tensor]:
        scale = self.shape.head_dim**-0.5
        group = self.shape.heads[0] // self.shape.heads[1]
        dk = torch.zeros(self.shape.head_dim, device="cuda", dtype=torch.float64)
        dv = torch.zeros(self.shape.head_dim_v, device="cuda", dtype=torch.float64)
        sees = (self.begin <= key) & (key < self.end)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q, dout, out = (x[sees, head].double() for x in (self.q, self.dout, self.out))
            logits = q @ self.k[key, kv_head].double() * scale
            p = torch.exp(logits - self.lse[sees, head].double())
            delta = (dout * out).sum(dim=1)
            ds = p * (dout @ self.v[key, kv_head].double() - delta)
            dk += scale * (ds @ q)
            dv += p @ dout
        return dk, dv


def bench_shape(shape: Shape, rounds: int, without: Sequence[str]) -> list[Line]:
    """Our backward in both modes, in turns with torch's backends where they can run the shape."""
    problem = BackwardProblem(shape)
    worst = max(problem.check_gradients(work) for work in (problem.work, problem.in_order))
    on_sm80(partial(problem.check_gradients, problem.work))()
    print(f"{shape.name}: worst rel-L2 of sampled rows and keys {worst:.2e}")
    calls: dict[str, Callable[[], object]] = {
        "ours": partial(problem.gradients, problem.work),
        "ours overwriting": partial(problem.gradients, problem.work, accumulate=False),
        "ours deterministic": partial(problem.gradients, problem.in_order),
        "ours sm80": on_sm80(partial(problem.gradients, problem.work)),
    }
    for name, backend in CONTESTANTS.items() if shape.mask in ("full", "causal") else ():
        if name in without:
            continue
        try:
            calls[name] = problem.torch_backward(backend)
            calls[name]()
        except RuntimeError as error:
            calls.pop(name, None)
            print(f"{shape.name}: {name} cannot run it: {str(error).splitlines()[0]}")
    calls = {name: call for name, call in calls.items() if name not in without}
    return lines_of(shape.name, time_in_turns(calls, rounds), problem.tflop)


def main(arguments: list[str] | None = None) -> int:
    """Checks, measures, reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--only", nargs="+", choices=names, help="default: all")
    parser.add_argument("--without", nargs="+", default=(), help="contestants to leave out")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args(arguments)
    lines: list[Line] = []
    with torch.no_grad():
        for shape in SHAPES:
            if shape.name in (args.only or names):
                lines += bench_shape(shape, args.rounds, args.without)
                torch.cuda.empty_cache()
    print_table(lines)
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
