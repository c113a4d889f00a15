"""`python -m megatron_splitkv.verify`: is Split-KV right on this machine, and do ranks talk?

Without a launcher it starts its own local ranks. Inside torchrun it takes the world it is given, so
the same command checks a cluster. Everything is held against dense fp64 attention or against
Megatron's own model on one rank, both where queries travel and where keys do. The exit code is 0
only if every check passed.

examples:
  python -m megatron_splitkv.verify
  python -m megatron_splitkv.verify --cp 4 --partial-dtype bf16 --stages 1
  torchrun --nproc-per-node 8 -m megatron_splitkv.verify --json verify.json
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace

import torch
from rich.console import Console

from megatron_splitkv.checks.attention_checks import check_attention
from megatron_splitkv.checks.contract_checks import check_contract
from megatron_splitkv.checks.op_checks import check_ops
from megatron_splitkv.checks.options import output_file, positive_float, positive_int
from megatron_splitkv.checks.processes import (
    World,
    choose_backend,
    choose_device,
    cp_transport,
    gather_from_all,
    is_launched,
    join_world,
    start_ranks,
)
from megatron_splitkv.checks.table import Check, failed, print_checks, worst_of_ranks
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import PARTIAL_DTYPES, SplitKVConfig
from megatron_splitkv.errors import UnsupportedError

SECTIONS = ("ops", "attention", "model")
DEFAULT_CP_WITHOUT_GPU = 2
WIDTH_IN_A_FILE = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, prints, returns the exit code.

    Args:
        argv: options, by default those of the command line.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(given)
    try:
        config = config_of(args)
        if is_launched():
            return run(args, config)
        cp_size = args.cp or (torch.cuda.device_count() or DEFAULT_CP_WITHOUT_GPU)
        if cp_size > 1:
            # Refused once, here, and not by each of the ranks.
            choose_backend(args.backend, choose_device(args.device, 0), cp_size)
            return start_ranks("megatron_splitkv.verify", given, cp_size, args.timeout)
        return run(args, config)
    except ValueError as error:
        print(f"verify: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    defaults = SplitKVConfig()
    parser = argparse.ArgumentParser(
        prog="python -m megatron_splitkv.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--cp",
        type=positive_int,
        metavar="N",
        help="context-parallel ranks (default: inside torchrun all processes, else one for each "
        "GPU, or 2 without a GPU)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto takes a GPU if there is one (default: %(default)s)",
    )
    add(
        "--backend",
        choices=("auto", "nccl", "gloo"),
        default="auto",
        help="auto takes nccl if each local rank has its own GPU (default: %(default)s)",
    )
    add(
        "--partial-dtype",
        choices=PARTIAL_DTYPES,
        default=defaults.partial_dtype,
        help="wire format of returned partials (default: %(default)s)",
    )
    add(
        "--stages",
        type=positive_int,
        metavar="N",
        help="upper bound on the exchanges of a layer (default: chosen by rows)",
    )
    add(
        "--keep-queries",
        action="store_true",
        help="queries, or keys, travel once and are kept for backward",
    )
    add(
        "--skip",
        nargs="+",
        choices=SECTIONS,
        default=[],
        help="leave sections out; model needs megatron-core (default: none)",
    )
    add(
        "--timeout",
        type=positive_float,
        default=110.0,
        metavar="S",
        help="seconds for the run, and for a collective (default: %(default)s)",
    )
    add("--json", type=output_file, metavar="FILE", help="also write the checks to this file")
    return parser


def config_of(args: argparse.Namespace) -> SplitKVConfig:
    """The settings that the options name."""
    return SplitKVConfig(
        num_stages=args.stages, partial_dtype=args.partial_dtype, keep_queries=args.keep_queries
    )


def run(args: argparse.Namespace, config: SplitKVConfig) -> int:
    """Makes the checks as one rank of the world, and prints them on the first.

    Returns:
        0 if every check of every rank passed, else 1; the same on every rank.
    Raises:
        ValueError: `--cp` does not fit the world.
    """
    start = time.perf_counter()
    with join_world(device=args.device, backend=args.backend, timeout_s=args.timeout) as world:
        config = replace(config, transport=world.transport)
        cp_size = args.cp or world.size
        transport = cp_transport(world, cp_size)
        sections: dict[str, Callable[[], list[Check]]] = {
            "ops": lambda: check_ops(world.device),
            "attention": lambda: [
                *check_attention(world.device, transport, config),
                *check_contract(world.device, transport, config),
            ],
            "model": lambda: _check_models(transport, world.device, config),
        }
        mine: list[Check] = [_check_group(transport, args.cp or world.size, world)]
        for name in SECTIONS:
            if name not in args.skip:
                _say(world, f"{name} ...", start)
                mine += _checks_of(name, sections[name])
        checks = worst_of_ranks(gather_from_all(mine, world))
        if world.rank == 0:
            _report(checks, args, world, cp_size, time.perf_counter() - start)
        return 0 if all(check.is_ok for check in checks) else 1


def _checks_of(name: str, make: Callable[[], list[Check]]) -> list[Check]:
    """A section's checks; what is not supported here is a failed check, the same on all ranks."""
    try:
        return make()
    except UnsupportedError as error:
        return [failed(name, "supported on this machine", str(error))]


def _check_group(transport: Transport | None, asked: int, world: World) -> Check:
    """Whether as many ranks answer as were asked for: nothing runs smaller in silence."""
    answers = 1
    if transport is not None:
        mine = torch.tensor([[transport.rank]], device=world.device).view(torch.uint8)
        answers = len(transport.all_gather(mine).wait().view(torch.int64).unique())
    return Check(
        section="group",
        name="ranks that compute together",
        value=answers,
        limit=asked,
        bound="at least",
        note=f"{world.size} processes, {world.backend}",
    )


def _check_models(
    transport: Transport | None, device: torch.device, config: SplitKVConfig
) -> list[Check]:
    """The model checks, or one failure where Megatron is missing or is not one that we know."""
    with _quiet():
        try:
            from megatron_splitkv.mcore import parity
        except ImportError as error:
            note = f"{error}; pip install megatron-core, or leave it out with --skip model"
            return [failed("model", "megatron-core can be imported", note)]
        return parity.check_models(transport, device, config)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Without the notices of libraries about packages that are not installed."""
    loggers = [logging.getLogger(name) for name in ("megatron", "torch.utils.cpp_extension")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _say(world: World, text: str, start: float) -> None:
    if world.rank == 0:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", file=sys.stderr, flush=True)


def _report(
    checks: Sequence[Check], args: argparse.Namespace, world: World, cp_size: int, seconds: float
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_IN_A_FILE)
    title = (
        f"Split-KV on {world.device.type}, cp {cp_size}, {world.size} processes over "
        f"{world.backend}, partials in {args.partial_dtype}"
    )
    print_checks(checks, title, console)
    print(f"{seconds:.1f} s")
    if args.json:
        lines = [{**asdict(check), "is_ok": check.is_ok} for check in checks]
        args.json.write_text(
            json.dumps({"title": title, "seconds": seconds, "checks": lines}, indent=1)
        )


def _run_and_leave() -> None:
    """Entry of the command. A rank that fails leaves at once: the others must not wait for it."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.exit(code)


if __name__ == "__main__":
    _run_and_leave()
