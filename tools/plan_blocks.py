"""Plans the KV blocks of a pack of documents and shows who gets what. No torch, no GPU.

examples:
  python tools/plan_blocks.py --lengths 20000,12000,768 --cp 4 --block-size 512
  python tools/plan_blocks.py --lengths 131072 --cp 8 --heads 32/8 --window 4096
  python tools/plan_blocks.py --lengths 262144 --cp 8 --suffix 8192 --json
"""

import argparse
import json
import sys
import time

from rich.console import Console

from megatron_splitkv.config import PARTIAL_DTYPES, SplitKVConfig
from megatron_splitkv.plan import Causal, Full, Plan, Queries, Suffix, Window, make_plan
from megatron_splitkv.plan.report import (
    DTYPE_BYTES,
    AttentionShape,
    PlanReport,
    kv_ring_bytes,
    report_plan,
)

MAX_CP_SIZE = 1024  # rows are counted for each pair of ranks


def parse_lengths(text: str) -> list[int]:
    """Reads `20000,12000,768`; argparse shows the error."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers with commas between, as in 20000,12000,768"
        ) from None
    if any(length < 0 for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} holds a negative document length")
    return lengths


def parse_heads(text: str) -> tuple[int, int]:
    """Reads `32/8`, query heads and kv heads; `32` is as many of both."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be query heads / kv heads, as in 32/8")
    return int(parts[0]), int(parts[-1])


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What decides the placement."""
    add = parser.add_argument
    add(
        "--lengths",
        type=parse_lengths,
        required=True,
        metavar="L1,L2,...",
        help="document lengths in stream order, tokens",
    )
    add(
        "--cp",
        type=int,
        required=True,
        metavar="N",
        help=f"ranks of the context-parallel group, at most {MAX_CP_SIZE}",
    )
    add(
        "--block-size",
        type=int,
        metavar="N",
        help="KV tokens of a block, a multiple of 64 (default: the largest power of two up to 512 "
        "that leaves each rank 16 blocks, or smaller ones while the cost misses the tolerance)",
    )
    add(
        "--tolerance",
        type=float,
        default=0.001,
        metavar="F",
        help="accepted cost imbalance before whole documents are cut, max/mean - 1 in [0, 1] "
        "(default: %(default)s)",
    )
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--window", type=int, metavar="N", help="each row sees the last N keys")
    mask.add_argument("--full", action="store_true", help="each row sees its whole document")
    mask.add_argument(
        "--suffix", type=int, metavar="N", help="only the last N rows of a document are queries"
    )


def add_bytes_options(parser: argparse.ArgumentParser) -> None:
    """What a travelling row weighs."""
    add = parser.add_argument
    add(
        "--heads",
        type=parse_heads,
        default="32/8",
        metavar="Q/KV",
        help="query and kv heads of one rank (default: %(default)s). Query heads weigh in the "
        "bytes of Split-KV, kv heads in those of a KV ring or all-gather, printed beside: dense, "
        "every rank gets all keys and values, and backward sends them again with dK and dV, all "
        "in --dtype",
    )
    add("--head-dim", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add(
        "--dtype",
        choices=sorted(DTYPE_BYTES),
        default="bf16",
        help="of q, k and v (default: %(default)s)",
    )
    add(
        "--partial-dtype",
        choices=PARTIAL_DTYPES,
        default="fp32",
        help="wire format of returned partials (default: %(default)s)",
    )
    add(
        "--stages",
        type=int,
        default=4,
        metavar="N",
        help="upper bound on the exchanges of a layer (default: %(default)s)",
    )
    add("--keep-queries", action="store_true", help="queries travel once and are kept for backward")


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_plan_options(parser)
    add_bytes_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def query_spec(args: argparse.Namespace) -> Queries:
    """The mask that the options name; causal by default."""
    if args.window is not None:
        return Window(args.window)
    if args.suffix is not None:
        return Suffix(args.suffix)
    return Full() if args.full else Causal()


def plan_and_report(args: argparse.Namespace) -> tuple[Plan, PlanReport, float]:
    """The plan, its figures, and how long planning took in ms.

    Raises:
        ValueError: what the library refuses, or too many ranks to count the rows of each pair.
    """
    if args.cp > MAX_CP_SIZE:
        raise ValueError(f"--cp {args.cp} must be at most {MAX_CP_SIZE} ranks")
    config = SplitKVConfig(
        block_size=args.block_size,
        num_stages=args.stages,
        partial_dtype=args.partial_dtype,
        keep_queries=args.keep_queries,
        balance_tolerance=args.tolerance,
    )
    shape = AttentionShape(
        num_heads_q=args.heads[0],
        head_dim_qk=args.head_dim,
        head_dim_v=args.head_dim,
        dtype=args.dtype,
    )
    start = time.perf_counter()
    plan = make_plan(
        args.lengths,
        args.cp,
        queries=query_spec(args),
        block_size=config.block_size,
        tolerance=config.balance_tolerance,
    )
    planning_ms = (time.perf_counter() - start) * 1e3
    return plan, report_plan(plan, shape, config), planning_ms


def comparison(report: PlanReport, ring: tuple[int, int], num_heads_kv: int) -> str:
    """One line: mean bytes of a rank, here and with a KV ring, and what the ring is taken to be."""
    cp_size, dtype = len(report.cost), report.shape.dtype

    def megabytes(forward: int, backward: int) -> str:
        return f"{forward / cp_size / 1e6:.2f} MB fwd, {backward / cp_size / 1e6:.2f} MB bwd"

    split_kv = megabytes(sum(report.bytes_forward), sum(report.bytes_backward))
    return (
        f"mean of a rank: Split-KV {split_kv}; KV ring or all-gather {megabytes(*ring)} "
        f"({num_heads_kv} kv heads, dense: every rank gets all keys; k, v, dk, dv in {dtype})"
    )


def main() -> int:
    """Plans, reports, returns the exit code."""
    args = build_parser().parse_args()
    num_heads_kv = args.heads[1]
    try:
        plan, report, planning_ms = plan_and_report(args)
        ring = kv_ring_bytes(plan, report.shape, num_heads_kv=num_heads_kv)
    except ValueError as error:
        print(f"plan_blocks.py: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        figures = report.as_dict() | {
            "ring_bytes_forward": ring[0],
            "ring_bytes_backward": ring[1],
            "planning_ms": planning_ms,
            "block_size": plan.block_size,
        }
        print(json.dumps(figures))
        return 0
    console = Console(highlight=False)
    console.print(report.as_table())
    console.print(comparison(report, ring, num_heads_kv))
    console.print(
        f"{len(plan.doc_lens)} documents, {report.whole_documents} whole on one rank; "
        f"block size {plan.block_size}; planned in {planning_ms:.3f} ms; plan {plan.fingerprint}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
