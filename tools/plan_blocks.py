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
from megatron_splitkv.plan import Causal, Full, Queries, Suffix, Window, make_plan
from megatron_splitkv.plan.report import DTYPE_BYTES, AttentionShape, report_plan


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


def parse_heads(text: str) -> int:
    """Reads `32/8` or `32`; only query heads weigh anything, because keys do not travel."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be query heads / kv heads, as in 32/8")
    return int(parts[0])


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=parse_lengths,
        required=True,
        metavar="L1,L2,...",
        help="document lengths in stream order, tokens",
    )
    add("--cp", type=int, required=True, metavar="N", help="ranks of the context-parallel group")
    add(
        "--block-size",
        type=int,
        metavar="N",
        help="KV tokens of a block (default: the largest power of two up to 512 that leaves each "
        "rank 16 blocks)",
    )
    add(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="F",
        help="accepted cost imbalance before whole documents are cut (default: %(default)s)",
    )
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--window", type=int, metavar="N", help="each row sees the last N keys")
    mask.add_argument("--full", action="store_true", help="each row sees its whole document")
    mask.add_argument(
        "--suffix", type=int, metavar="N", help="only the last N rows of a document are queries"
    )
    add(
        "--heads",
        type=parse_heads,
        default=32,
        metavar="Q/KV",
        help="query and kv heads of one rank, for the bytes (default: 32/8)",
    )
    add("--head-dim", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="(default: %(default)s)")
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
    add("--json", action="store_true", help="print one JSON object")
    return parser  # fmt: skip


def query_spec(args: argparse.Namespace) -> Queries:
    """The mask that the options name; causal by default."""
    if args.window is not None:
        return Window(args.window)
    if args.suffix is not None:
        return Suffix(args.suffix)
    return Full() if args.full else Causal()


def main() -> int:
    """Plans, reports, returns the exit code."""
    args = build_parser().parse_args()
    try:
        config = SplitKVConfig(
            num_stages=args.stages, partial_dtype=args.partial_dtype, keep_queries=args.keep_queries
        )
        shape = AttentionShape(
            num_heads_q=args.heads, head_dim_qk=args.head_dim, head_dim_v=args.head_dim,
            dtype=args.dtype,
        )  # fmt: skip
        start = time.perf_counter()
        plan = make_plan(
            args.lengths, args.cp, queries=query_spec(args), block_size=args.block_size,
            tolerance=args.tolerance,
        )  # fmt: skip
        planning_ms = (time.perf_counter() - start) * 1e3
    except ValueError as error:
        print(f"plan_blocks.py: error: {error}", file=sys.stderr)
        return 2
    report = report_plan(plan, shape, config)
    if args.json:
        figures = report.as_dict() | {"planning_ms": planning_ms, "block_size": plan.block_size}
        print(json.dumps(figures))
        return 0
    console = Console(highlight=False)
    console.print(report.as_table())
    console.print(
        f"{len(plan.doc_lens)} documents, {report.whole_documents} whole on one rank; "
        f"block size {plan.block_size}; planned in {planning_ms:.3f} ms; plan {plan.fingerprint}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
