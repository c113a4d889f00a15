"""The options of `plan_blocks.py`, and what they name: packs, a query spec, a machine."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from plan_inputs import DISTRIBUTIONS, Pack, draw_pack, packs_of_dataset, read_packs

from megatron_splitkv.config import PARTIAL_DTYPES, ROUTES
from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Machine,
    Prefix,
    Queries,
    Suffix,
    Window,
    choose_route,
)
from megatron_splitkv.plan.predict import Network
from megatron_splitkv.plan.report import DTYPE_BYTES, AttentionShape

MAX_CP_SIZE = 4096  # rows are counted for each pair of ranks


def parse_lengths(text: str) -> Pack:
    """Reads `20000,12000,768`; argparse shows the error."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
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


def parse_split(text: str) -> str:
    """Checks `99,1,0`, shares of training, validation and test; argparse shows the error."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be up to three shares with commas between, not all 0, as in 99,1,0"
        )
    return text


def parse_speeds(text: str) -> tuple[float, ...]:
    """Reads `1,1,0.8`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be numbers with commas between, as in 1,1,0.8"
        ) from None


def parse_tolerance(text: str) -> float | str:
    """Reads a share such as 0.001, or `auto`."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or 'auto'") from None


def add_pack_options(parser: argparse.ArgumentParser) -> None:
    """Where the documents come from."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        type=parse_lengths,
        metavar="L1,L2,...",
        help="document lengths in stream order, tokens",
    )
    source.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="packs in .json (a list of lengths or of such lists), .csv (one pack a line) or .npy",
    )
    source.add_argument(
        "--idx",
        metavar="PREFIX",
        help="a Megatron dataset (PREFIX.idx, PREFIX.bin): the packs that training would see with "
        "--dataloader-inter-document-masking; needs megatron-core",
    )
    source.add_argument(
        "--distribution",
        choices=sorted(DISTRIBUTIONS),
        help="lengths drawn from a named distribution: "
        + "; ".join(f"{name}: {kind.about}" for name, kind in DISTRIBUTIONS.items()),
    )
    add = parser.add_argument
    add("--tokens", type=int, default=131072, metavar="N", help="of a drawn pack (%(default)s)")
    add("--seq-length", type=int, default=8192, metavar="N", help="of --idx (%(default)s)")
    add("--samples", type=int, metavar="N", help="training samples of the run, for --idx")
    add(
        "--split",
        type=parse_split,
        default="100,0,0",
        help="as training has it, for --idx (%(default)s)",
    )
    add("--seed", type=int, default=1234, help="of training or of the draw (%(default)s)")
    add("--packs", type=int, default=1, metavar="N", help="packs to draw or to read from --idx")
    add("--pack", type=int, default=1, metavar="I", help="the pack to show, from 1 (%(default)s)")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What decides the placement."""
    add = parser.add_argument
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
        help="KV tokens of a block, a multiple of 64; cuts fall on blocks where balance allows "
        "(default: the largest power of two up to 512 that leaves each rank 16 blocks)",
    )
    add(
        "--tolerance",
        type=parse_tolerance,
        default=0.001,
        metavar="F",
        help="accepted cost imbalance, max/mean - 1 in [0, 1]; 'auto' takes the one with the least "
        "predicted layer time and needs --calibration (default: %(default)s)",
    )
    add("--calibration", type=Path, metavar="PATH", help="JSON file made by tools/calibrate.py")
    add("--speeds", type=parse_speeds, default=(), metavar="S1,S2,...", help="of the ranks")
    add("--ranks-per-node", type=int, metavar="N", help="documents keep to few nodes")
    add("--network-gb-per-s", type=float, metavar="F",
        help="predictions: what a rank sends to other nodes; the calibration has the link inside "
        "a node (default: the same link everywhere)")  # fmt: skip
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--window", type=int, metavar="N", help="each row sees the last N keys")
    mask.add_argument("--full", action="store_true", help="each row sees its whole document")
    mask.add_argument(
        "--prefix", type=int, metavar="N", help="rows see the first N keys and those before them"
    )
    mask.add_argument(
        "--suffix", type=int, metavar="N", help="only the last N rows of a document are queries"
    )
    mask.add_argument(
        "--anchors",
        metavar="N|PATH",
        help="blocks of query rows that see the keys before an anchor: N anchors spread evenly "
        "over each document, or a JSON file with one ascending list for each document",
    )
    add("--rows-per-anchor", type=int, default=16, metavar="N", help="(default: %(default)s)")


def add_bytes_options(parser: argparse.ArgumentParser) -> None:
    """What a travelling row weighs."""
    add = parser.add_argument
    add(
        "--heads",
        type=parse_heads,
        default="32/8",
        metavar="Q/KV",
        help="query and kv heads of one rank (default: %(default)s). Query heads weigh in the "
        "bytes where queries travel, kv heads where keys do and in those of a KV ring or "
        "all-gather, printed beside: dense, every rank gets all keys and values, and backward "
        "sends them again with dK and dV, all in --dtype",
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
        default="auto",
        help="wire format of returned partials; auto is fp16 for bf16, else fp32 "
        "(default: %(default)s)",
    )
    add(
        "--stages",
        type=int,
        metavar="N",
        help="upper bound on the exchanges of a layer, or on the groups of KV heads (default: "
        "chosen by rows, or at most 2 groups)",
    )
    add(
        "--keep-queries",
        action="store_true",
        help="queries, or keys, travel once and are kept for backward",
    )
    add(
        "--route",
        choices=("auto", *ROUTES),
        default="auto",
        help="what travels: queries to the keys, or keys and values to the queries; auto goes by "
        "--heads, mask and ranks, as in training (default: %(default)s)",
    )


# Which options say more about what: without it they would change nothing.
NEEDED_BY = {
    "tokens": ("distribution",),
    "seq_length": ("idx",),
    "samples": ("idx",),
    "split": ("idx",),
    "seed": ("distribution", "idx"),
    "packs": ("distribution", "idx"),
    "rows_per_anchor": ("anchors",),
}


def refuse_idle_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Stops options that would be ignored.

    Raises:
        ValueError: one is given beside a source of packs, or a mask, that it says nothing about.
    """
    for name, owners in NEEDED_BY.items():
        is_idle = all(getattr(args, owner) is None for owner in owners)
        if is_idle and getattr(args, name) != parser.get_default(name):
            option, needed = (_option(x) for x in (name, owners[0]))
            others = "".join(f" or {_option(owner)}" for owner in owners[1:])
            raise ValueError(f"{option} belongs to {needed}{others}; give that, or leave it out")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def packs_of(args: argparse.Namespace) -> list[Pack]:
    """The packs that the options name.

    Raises:
        ValueError: a bad file, dataset or count.
        OSError: a file cannot be read.
    """
    if args.packs < 1 or args.tokens < 1 or args.seq_length < 1:
        raise ValueError("--packs, --tokens and --seq-length must be at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must be at least 0")
    if args.lengths is not None:
        return [args.lengths]
    if args.file is not None:
        return read_packs(args.file)
    if args.distribution is not None:
        rng = np.random.default_rng(args.seed)
        return [draw_pack(args.distribution, args.tokens, rng) for _ in range(args.packs)]
    if args.samples is None or args.samples < 1:
        raise ValueError(
            "--idx needs --samples N, the training samples of the run (iterations times global "
            "batch size): Megatron shuffles by it"
        )
    return packs_of_dataset(
        args.idx,
        sequence_length=args.seq_length,
        num_samples=args.samples,
        num_packs=args.packs,
        seed=args.seed,
        split=args.split,
    )


def query_spec(args: argparse.Namespace, pack: Pack) -> Queries:
    """The mask that the options name; causal by default.

    Raises:
        ValueError: a bad spec, or a bad file of anchors.
    """
    if args.window is not None:
        return Window(args.window)
    if args.prefix is not None:
        return Prefix(tuple(min(args.prefix, length) for length in pack))
    if args.suffix is not None:
        return Suffix(args.suffix)
    if args.anchors is not None:
        return Anchors(_anchor_positions(args.anchors, pack), args.rows_per_anchor)
    return Full() if args.full else Causal()


def _anchor_positions(text: str, pack: Pack) -> tuple[tuple[int, ...], ...]:
    if text.isdecimal():
        count = int(text)
        return tuple(tuple((i + 1) * n // count for i in range(count)) for n in pack)
    try:
        data = json.loads(Path(text).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{text}, line {error.lineno}: {error.msg}") from None
    if not isinstance(data, list) or not all(isinstance(entry, list) for entry in data):
        raise ValueError(f"{text}: must be one list of anchors for each document")
    return tuple(tuple(entry) for entry in data)


def shape_of(args: argparse.Namespace) -> AttentionShape:
    """Heads, dims and dtype of the options.

    Raises:
        ValueError: kv heads that do not divide the query heads, or a dim below 1.
    """
    return AttentionShape(
        num_heads_q=args.heads[0],
        num_heads_kv=args.heads[1],
        head_dim_qk=args.head_dim,
        head_dim_v=args.head_dim,
        dtype=args.dtype,
    )


def route_of(args: argparse.Namespace, shape: AttentionShape, queries: Queries) -> str:
    """The route of the options; auto is resolved."""
    if args.route != "auto":
        return args.route
    return choose_route(shape, args.cp, queries, num_stages=args.stages)


def network_of(args: argparse.Namespace) -> Network | None:
    """The wire between nodes that the options name.

    Raises:
        ValueError: a rate without nodes or without a calibration, or one that is none.
    """
    if args.network_gb_per_s is None:
        return None
    if args.calibration is None:
        raise ValueError(
            "--network-gb-per-s is of predictions, which need --calibration PATH; see "
            "tools/calibrate.py"
        )
    if args.ranks_per_node is None:
        raise ValueError("--network-gb-per-s needs --ranks-per-node N")
    return Network(ranks_per_node=args.ranks_per_node, gb_per_s=args.network_gb_per_s)


def machine_of(args: argparse.Namespace, calibrated: Machine | None) -> Machine:
    """Speeds and nodes of the options, rows and runs of a calibration."""
    known = calibrated or Machine()
    return Machine(
        row_pairs=known.row_pairs,
        run_pairs=known.run_pairs,
        rank_speeds=args.speeds,
        ranks_per_node=args.ranks_per_node,
    )
