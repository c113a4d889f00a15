"""Context-parallel attention with its communication: Split-KV, KV ring, KV all-gather, Ulysses.

All methods run on our kernels, so only the method differs. Each is checked against dense fp64
before it is timed.

replay  one process, the ranks one after the other on one device: compute and balance are measured
        with the real layouts, up to 64 ranks; what a rank waits for is modelled from --alpha-us,
        --host-gbs and --network-gbs. Launch gaps are not in it: work is queued ahead.
real    under torchrun, any number of ranks, NCCL or gloo: everything is measured, max over ranks;
        on GPUs what the host takes to queue a step is measured apart.

"% ideal" is an even share of one GPU's step (the same attention at cp 1, measured in the same run)
over the step; "% ideal compute" is the same over the compute of the slowest rank alone. It can pass
100: a rank's short run may clock higher than the long one of one GPU, and meets fewer heads in L2.

examples:
  python tools/bench_cp.py replay --cp 8 64 --workloads 128k 128k-gqa pile 8k-1m
  python tools/bench_cp.py replay --cp 4 --lengths 4000,300 --heads 8/2 --head-dim 64 --device cpu
  torchrun --nproc-per-node 8 tools/bench_cp.py real --workloads 128k-gqa --json real.json
  torchrun --nproc-per-node 2 tools/bench_cp.py real --workloads pack --methods split-kv te-p2p \
      --transport nccl symmetric --stages 1 2 4
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from cp_baselines import METHODS
from cp_gate import check_on_threads
from cp_measure import Measurement, measure_real
from cp_measure_replay import measure_replay
from cp_methods import Method, SplitKV, variant
from cp_peers import PEERS
from cp_replay import Link
from cp_report import Line, markdown, print_lines
from cp_workloads import NAMES, WORKLOADS, Workload, workload_of
from plan_options import parse_heads, parse_lengths

from megatron_splitkv.checks.options import output_file, positive_float, positive_int
from megatron_splitkv.checks.processes import (
    World,
    choose_device,
    cp_transport,
    is_launched,
    join_world,
)
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import PARTIAL_DTYPES, ROUTES, TRANSPORTS, SplitKVConfig
from megatron_splitkv.plan import Causal, Suffix

# Two H200 of one host, NCCL 2.28.9: 175 to 305 GB/s all_to_all at 64 to 1024 MiB, 197 to 266
# all_gather, 182 to 331 send-recv; 75 to 90 us for small collectives (measured, NVLink 18).
ALPHA_US, HOST_GBS = 80.0, 250.0
# One 400 Gb/s adapter for each GPU, 90 % of it. Assumed, not measured.
NETWORK_GBS, HOST_SIZE = 45.0, 8
DEFAULT_CP = 8
START = time.perf_counter()


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mode", choices=("replay", "real"))
    add("--workloads", nargs="+", type=workload_of, metavar="NAME",
        help=f"of {', '.join(NAMES)}, or other sizes, as in 64k-gqa, 2k-1m, pile-64k (default: "
        "these)")  # fmt: skip
    add("--lengths", type=parse_lengths, metavar="L1,L2,...", help="instead: these documents")
    add(
        "--suffix",
        type=positive_int,
        metavar="N",
        help="with --lengths: only the last N rows are queries",
    )
    add("--heads", type=parse_heads, metavar="Q/KV", help="with --lengths (default: 32/8)")
    add("--head-dim", type=positive_int, metavar="N", help="with --lengths (default: 128)")
    add("--methods", nargs="+", choices=[*METHODS, *PEERS], default=list(METHODS), metavar="NAME",
        help=f"of {', '.join(METHODS)}, and in real mode {', '.join(PEERS)}, which need "
        "transformer-engine (default: all that run on our kernels)")  # fmt: skip
    add("--cp", type=positive_int, nargs="+", metavar="N",
        help="replay: ranks to simulate (default: 8); real takes all processes")  # fmt: skip
    add(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="timed rounds, medians (default: %(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add("--partial-dtype", choices=PARTIAL_DTYPES, default=SplitKVConfig().partial_dtype,
        help="how partial sums travel: partial outputs and dq of split-kv, and with as many bits "
        "dk and dv of the others (default: %(default)s)")  # fmt: skip
    add("--stages", type=positive_int, nargs="+", default=[None], metavar="N",
        help="of split-kv; several are compared (default: chosen by rows)")  # fmt: skip
    add("--route", choices=("auto", *ROUTES), nargs="+", default=["auto"],
        help="of split-kv: what travels; several are compared (default: %(default)s, as Megatron's "
        "runs choose by their heads)")  # fmt: skip
    add("--transport", choices=TRANSPORTS, nargs="+", default=["auto"],
        help="real: what moves the rows of our methods; several are compared "
        "(default: %(default)s)")  # fmt: skip
    add("--keep-queries", action="store_true", help="of split-kv: queries travel once")
    add("--alpha-us", type=positive_float, default=ALPHA_US, metavar="US",
        help="replay: latency of a collective (default: %(default)s)")  # fmt: skip
    add("--host-gbs", type=positive_float, default=HOST_GBS, metavar="GBS",
        help="replay: rate of a rank inside its host (default: %(default)s)")  # fmt: skip
    add("--network-gbs", type=positive_float, default=NETWORK_GBS, metavar="GBS",
        help="replay: rate of a rank to other hosts (default: %(default)s)")  # fmt: skip
    add("--host-size", type=positive_int, default=HOST_SIZE, metavar="N",
        help="replay: ranks of a host (default: %(default)s)")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="also write the lines to this file")
    add("--markdown", type=output_file, metavar="FILE", help="also write the table to this file")
    return parser


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """The named workloads, or the one that the options describe.

    Raises:
        ValueError: kv heads do not divide query heads, or options do not go together.
    """
    if args.lengths is None:
        for name in ("suffix", "heads", "head_dim"):
            if getattr(args, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} describes a workload of its own; give --lengths too")
        return args.workloads or WORKLOADS
    if args.workloads:
        raise ValueError("--workloads and --lengths exclude each other; give one of them")
    heads_q, heads_kv = heads = args.heads or (32, 8)
    if heads_q % heads_kv:
        raise ValueError(f"--heads {heads_q}/{heads_kv}: kv heads must divide query heads")
    queries = Causal() if args.suffix is None else Suffix(args.suffix)
    return [
        Workload(name="custom", doc_lens=tuple(args.lengths), queries=queries, heads=heads,
                 head_dim=args.head_dim or 128)
    ]  # fmt: skip


def run(args: argparse.Namespace, world: World | None, device: torch.device) -> list[Line]:
    """Checks and times every workload.

    Args:
        world: the processes, in real mode.
        device: of this process.
    Raises:
        ValueError: a method is wrong, or a size makes no sense.
    """
    config = SplitKVConfig(
        num_stages=args.stages[0], partial_dtype=args.partial_dtype, keep_queries=args.keep_queries
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transports: dict[str, Transport | None] = {"auto": None}
    if world is not None:
        transports = {name: cp_transport(world, world.size, name) for name in args.transport}
    kinds = kinds_of(args, transports)
    lines: list[Line] = []
    passed: set[object] = set()
    for workload in workloads_of(args):
        measurement = Measurement(
            workload=workload, kinds=kinds, config=config, device=device, dtype=dtype,
            rounds=args.rounds,
        )  # fmt: skip
        if world is None:
            shares = check_on_threads(kinds, workload, device, dtype, config)
            say(f"{workload.name}: right ({', '.join(f'{n} {s:.2f}' for n, s in shares.items())} "
                "of the limit)")  # fmt: skip
            link = Link(
                alpha_us=args.alpha_us, host_gbs=args.host_gbs, network_gbs=args.network_gbs,
                host_size=args.host_size,
            )  # fmt: skip
            lines += measure_replay(measurement, args.cp or [DEFAULT_CP], link, say)
        else:
            say_once = say if world.rank == 0 else _nothing
            transport = transports[args.transport[0]]
            lines += measure_real(measurement, world, transport, say_once, passed)
        if world is None or world.rank == 0:
            write_files(lines, args)
    return lines


def kinds_of(
    args: argparse.Namespace, transports: Mapping[str, Transport | None]
) -> list[type[Method]]:
    """The methods, each of ours once for every transport, split-kv also for every bound of stages
    and every route; what there is one of is not in their names.
    """
    kinds: list[type[Method]] = []
    for method in args.methods:
        kind = (METHODS | PEERS)[method]
        if not kind.is_ours:
            kinds.append(kind)
            continue
        is_product = issubclass(kind, SplitKV)
        all_stages = args.stages if is_product else args.stages[:1]
        routes = args.route if is_product else args.route[:1]
        for name, transport in transports.items():
            for stages in all_stages:
                for route in routes:
                    words = [name] if len(transports) > 1 else []
                    words += [str(stages)] if len(all_stages) > 1 else []
                    words += [route] if len(routes) > 1 else []
                    is_plain = not words and route == "auto"
                    chosen = kind if is_plain else variant(kind, words, transport, stages, route)
                    kinds.append(chosen)
    return kinds


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _nothing(text: str) -> None:
    pass


def caption_of(args: argparse.Namespace, device: torch.device) -> str:
    """What is measured and what is modelled."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    partial_dtype = SplitKVConfig(partial_dtype=args.partial_dtype).resolved_partial_dtype(dtype)
    partials = f"{dtype}, partial sums in {partial_dtype}"
    if args.stages != [None]:
        partials += f", at most {', '.join(map(str, args.stages))} stages"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if args.mode == "real":
        transports = ", ".join(args.transport)
        return f"{name}, {partials}, transport {transports}. Everything measured, max over ranks."
    return (
        f"{name}, {partials}. Measured: compute, max/mean, % other, MB, peak. Modelled: fwd ms, "
        f"bwd ms and what follows from them, with {args.alpha_us:g} us a collective, "
        f"{args.host_gbs:g} GB/s inside a host of {args.host_size}, {args.network_gbs:g} GB/s "
        "outside, compute and wire side by side."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        refuse_mode(args)
        if args.mode == "real":
            with join_world(device=args.device, backend="auto", timeout_s=600) as world:
                lines = run(args, world, world.device)
                if world.rank == 0:
                    print_lines(lines, caption_of(args, world.device))
        else:
            device = choose_device(args.device, 0)
            print_lines(run(args, None, device), caption_of(args, device))
    except ValueError as error:
        print(f"bench_cp.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def refuse_mode(args: argparse.Namespace) -> None:
    """Stops a mode that was started in the wrong way.

    Raises:
        ValueError: real without a launcher or with --cp, or replay in several processes.
    """
    if args.mode == "replay" and is_launched():
        raise ValueError("replay is one process; start it with python, without torchrun")
    if args.mode == "replay" and not METHODS.keys() >= set(args.methods):
        raise ValueError(f"{', '.join(PEERS)} need real ranks; leave them out of replay")
    if args.mode == "real" and args.cp:
        raise ValueError("--cp is for replay; real takes all processes of torchrun")
    if args.mode == "real" and not is_launched():
        raise ValueError("real needs ranks; start it with torchrun --nproc-per-node N")


def write_files(lines: Sequence[Line], args: argparse.Namespace) -> None:
    """Writes what there is so far: a run that is cut short leaves the workloads it finished."""
    if args.json:
        figures = [{**asdict(line), "step_ms": line.step_ms} for line in lines]
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "lines": figures}, indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
