"""Weak and strong scaling on the GPUs of this host, and a projection to more of them.

For groups of 1, 2, 4, ... ranks, up to all GPUs: weak scaling with a fixed number of context tokens
a rank (8192 query rows against all of them; one causal document; packed documents), and strong
scaling of whole workloads, beside KV ring, KV all-gather, Ulysses and, where it is installed,
TransformerEngine. Each method is checked against dense fp64 and timed as in `bench_cp.py real`.
"% ideal" is TFLOP/s of a GPU by visible pairs over the best that Split-KV reached on one GPU with
workloads of that kind, earlier in the same run.

Then the terms of `plan_blocks.py --simulate` are fitted to all groups but the largest, checked on
that one, and projected to 1024 ranks on nodes of 8. A pair of nodes is not measured: its wire is
what --network-gbs says.

A run keeps to --budget-s: what matters most comes first, and a workload starts if the time left
allows it, by what those before took. First comes Split-KV on all kinds with the first of --tokens,
in every group; one GPU runs its other workloads before it ends, if the time allows all that. Then
come the other methods there; then strong scaling; then the other sizes. A group starts again while
something fits. The report names what did not run. The files are written anew after each workload,
so that a run that is ended leaves what it had. Start it with python; it starts the ranks itself.

examples:
  python tools/bench_scaling.py --json scaling.json --markdown scaling.md --plot scaling.png
  python tools/bench_scaling.py --cp 1 2 --tokens 65536 16384 --methods split-kv te-p2p
  python tools/bench_scaling.py --device cpu --cp 1 2 --tokens 256 --rows 64 --strong 1k-gqa
"""

import argparse
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from cp_baselines import METHODS
from cp_peers import PEERS
from cp_report import Line
from cp_workloads import workload_of
from device_info import describe_device, in_words
from scaling_cases import (
    ASSUMED_TFLOPS,
    END_S,
    LEAST,
    OURS,
    Case,
    Pace,
    all_cases,
    choose,
    left_out,
    still_to_run,
    weak_workload,
)
from scaling_fit import NODE_RANKS, Fit, Projected, fit, measured_of, project
from scaling_report import Report, Row, markdown, plot, rows_of
from scaling_worker import Job, write_whole

from megatron_splitkv.checks.options import output_file, positive_float, positive_int
from megatron_splitkv.checks.processes import choose_device, start_ranks
from megatron_splitkv.config import TRANSPORTS
from megatron_splitkv.plan.predict import Calibration

TOOLS = Path(__file__).resolve().parent
START = time.time()
REPORT_S = 10.0  # of fit, projection and figure
K = 1024
# Pulls from symmetric memory inside a host with NVLink 18; kept where no group of two ranks is
# fitted. Between nodes: one 400 Gb/s adapter for each GPU, 90 % of it.
LINK_GBS, LINK_US, NETWORK_GBS = 360.0, 20.0, 45.0


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--cp",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="ranks of the groups (default: 1, 2, 4, ... up to all GPUs; on the CPU 1, 2)",
    )
    add("--tokens", type=positive_int, nargs="+", default=[64 * K, 128 * K, 32 * K, 16 * K],
        metavar="N", help="context tokens of a rank, what matters most first (default: 64, 128, 32 "
        "and 16 K)")  # fmt: skip
    add("--rows", type=positive_int, default=8 * K, metavar="N",
        help="query rows of the kind that has few (default: %(default)s)")  # fmt: skip
    add(
        "--strong",
        type=workload_of,
        nargs="*",
        metavar="NAME",
        default=[workload_of("256k-gqa"), workload_of("8k-1m")],
        help="workloads of strong scaling, as in bench_cp.py (default: 256k-gqa 8k-1m)",
    )
    add("--methods", nargs="+", choices=[*METHODS, *PEERS], metavar="NAME",
        help=f"of {', '.join([*METHODS, *PEERS])} (default: all that are installed)")  # fmt: skip
    add("--rounds", type=positive_int, default=2, metavar="N",
        help="timed rounds, medians (default: %(default)s)")  # fmt: skip
    add("--budget-s", type=positive_float, default=520.0, metavar="S",
        help="time of the whole run (default: %(default)s)")  # fmt: skip
    add("--network-gbs", type=positive_float, default=NETWORK_GBS, metavar="GBS",
        help="projection: what a rank sends to other nodes (default: %(default)s)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add("--transport", choices=TRANSPORTS, default="auto",
        help="what moves the rows of our methods (default: %(default)s)")  # fmt: skip
    add("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    add("--markdown", type=output_file, metavar="FILE", help="also write the tables to this file")
    add("--plot", type=output_file, metavar="FILE", help="draw the shares, as in scaling.png")
    return parser


def installed_methods() -> list[str]:
    """Ours first; those of TransformerEngine where it is installed."""
    others = [name for name in METHODS if name != OURS]
    return [OURS, *others, *(PEERS if find_spec("transformer_engine") else ())]


def versions_of(methods: Sequence[str]) -> dict[str, str]:
    """Of TransformerEngine, if it takes part."""
    if not (PEERS.keys() & set(methods) and find_spec("transformer_engine")):
        return {}
    try:
        return {"TransformerEngine": version("transformer_engine")}
    except PackageNotFoundError:
        return {"TransformerEngine": "of unknown version"}


def group_sizes(device: torch.device) -> list[int]:
    """1, 2, 4, ... up to all GPUs."""
    limit = torch.cuda.device_count() if device.type == "cuda" else 2
    return [1 << power for power in range(limit.bit_length())]


def measure(
    args: argparse.Namespace, cases: Sequence[Case], pace: Pace, keep: Callable[[list[Line]], None]
) -> list[Line]:
    """Starts the ranks of one group after another, each as often as something fits.

    Args:
        keep: given the lines so far, again and again.
    """
    lines: list[Line] = []
    given_up: set[int] = set()
    deadline = START + args.budget_s - REPORT_S
    while True:
        pending = [x for x in still_to_run(cases, lines) if x.cp_size not in given_up]
        left_s = deadline - time.time()
        chosen, _ = choose(pending, left_s, pace)
        if not chosen:
            return lines
        cp_size = chosen[0].cp_size
        job = Job(
            device=args.device,
            transport=args.transport,
            rounds=args.rounds,
            start=START,
            deadline=deadline - END_S,
            pace=pace,
            cases=pending,
        )
        least = [x for x in pending if x.level == LEAST and x.cp_size != cp_size]
        timeout_s = left_s - sum(choose(least, left_s, pace)[1])
        found, pace, code = run_job(job, cp_size, timeout_s, lines, keep)
        if code != 0 or len(found) == len(lines):
            given_up.add(cp_size)
        lines = found


def run_job(
    job: Job,
    cp_size: int,
    timeout_s: float,
    before: Sequence[Line],
    keep: Callable[[list[Line]], None],
) -> tuple[list[Line], Pace, int]:
    """Runs one group to its end, or until it has to be ended.

    Args:
        before: lines of other groups.
        keep: given these and what is done so far.
    Returns:
        All these lines, the pace to go on with, and the exit code.
    """
    lines, pace, text = list(before), job.pace, ""
    with tempfile.TemporaryDirectory() as folder:
        job_file, output = Path(folder, "job"), Path(folder, "done.json")
        job_file.write_bytes(pickle.dumps(job))

        def watch() -> None:
            nonlocal lines, pace, text
            found = output.read_text() if output.exists() else text
            if found != text:
                text = found
                mine, pace = read_done(text)
                lines = newest([*before, *mine])
                keep(lines)

        arguments = [str(job_file), str(output)]
        code = start_ranks("scaling_worker", arguments, cp_size, timeout_s, watch)
        watch()
    if code != 0:
        say(f"the ranks of cp {cp_size} failed with {code}")
    return lines, pace, code


def newest(lines: Iterable[Line]) -> list[Line]:
    """One line of each method on a workload, the last of those that have a time."""
    found: dict[tuple[str, int, str], Line] = {}
    for line in lines:
        key = (line.workload, line.cp_size, line.method)
        if line.step_ms is not None or key not in found:
            found[key] = line
    return list(found.values())


def read_done(text: str) -> tuple[list[Line], Pace]:
    """Lines, and the pace, as a worker wrote them."""
    done = json.loads(text)
    lines: list[Line] = []
    for figures in done["lines"]:
        figures.pop("step_ms")
        lines.append(Line(**figures))
    return lines, Pace(**done["pace"])


def predict(
    args: argparse.Namespace, rows: Sequence[Row], device: torch.device
) -> tuple[Fit, list[Projected]]:
    """Fits the terms to the smaller groups, checks them, and goes to more ranks."""
    is_cuda = device.type == "cuda"
    dtype = "bf16" if is_cuda else "fp32"
    ours = [row for row in rows if row.line.method == OURS and row.line.step_ms is not None]
    if not any(row.line.cp_size == 1 for row in ours):
        return Fit(missing="a step of ours on one rank"), []
    first = Calibration(
        device=torch.cuda.get_device_name(device) if is_cuda else "CPU",
        dtype=dtype, head_dim=128, num_heads_q=32, num_heads_kv=8, pair_ns=1.0, row_ns=0.0,
        run_ns=0.0, base_ns=0.0, worst_error=0.0, link_gb_per_s=LINK_GBS, link_latency_us=LINK_US,
        source="tools/bench_scaling.py",
    )  # fmt: skip
    measured = [
        measured_of(
            row.kind, workload_of(row.line.workload), row.line.cp_size, dtype, row.line.step_ms or 0
        )
        for row in ours
    ]
    found = fit(measured, first)
    projected: list[Projected] = []
    for kind, calibration in found.calibrations.items():
        alone = [x for x in measured if x.kind == kind and x.cp_size == 1]
        if not alone:
            missing = filter(None, (found.missing, f"a step of {kind} on one rank"))
            found = replace(found, missing="; ".join(missing))
            continue
        ideal = max(int(one.load.pairs[0]) / one.step_us for one in alone)
        for tokens in sorted(args.tokens):
            workload = weak_workload(kind, tokens * NODE_RANKS, args.rows)
            projected += project(kind, workload, calibration, args.network_gbs, ideal)
    return found, projected


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(f"[{time.time() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> str:
    """Measures, projects, writes the files.

    Returns:
        The tables.
    Raises:
        ValueError: a device that is not there, or more ranks than GPUs.
    """
    device = choose_device(args.device, 0)
    sizes = args.cp or group_sizes(device)
    methods = args.methods or installed_methods()
    methods = [OURS, *(name for name in methods if name != OURS)]
    if device.type == "cuda" and max(sizes) > torch.cuda.device_count():
        raise ValueError(f"--cp {max(sizes)} needs as many GPUs, got {torch.cuda.device_count()}")
    cases = all_cases(sizes, args.tokens, args.strong, args.rows, methods)
    weak = {(case.workload.name, case.cp_size) for case in cases if case.is_weak}
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    about = describe_device(device) | versions_of(methods)

    def keep(found: list[Line]) -> None:
        rows = rows_of(found, weak)
        write_files(args, about, Report(rows=rows, dropped=left_out(cases, found)))

    pace = Pace(rounds=args.rounds, tflops=ASSUMED_TFLOPS[device.type])
    lines = measure(args, cases, pace, keep)
    dropped = left_out(cases, lines)
    for name in dropped:
        say(f"not run within --budget-s {args.budget_s:g}: {name}")
    say("fitting and projecting")
    rows = rows_of(lines, weak)
    found, projected = predict(args, rows, device)
    report = Report(
        rows=rows, dropped=dropped, fit=found, projected=projected,
        network_gb_per_s=args.network_gbs,
    )  # fmt: skip
    text = write_files(args, about, report)
    if args.plot:
        plot(rows, projected, args.plot)
    say("done")
    return text


def write_files(args: argparse.Namespace, about: dict[str, str], report: Report) -> str:
    """What there is so far, as JSON and Markdown; returns the latter."""
    strong = [workload.name for workload in args.strong]
    head = f"{in_words(about)}; {args.rounds} rounds, transport {args.transport}"
    text = f"{head}\n\n{markdown(report, strong)}\n"
    if args.json:
        figures = {
            "about": about,
            "command": sys.argv,
            "dropped": report.dropped,
            "rows": [
                {**asdict(row.line), "step_ms": row.line.step_ms, "kind": row.kind,
                 "tokens_per_rank": row.tokens_per_rank, "share": row.share,
                 "planned_imbalance": row.planned_imbalance}
                for row in report.rows
            ],
            "calibrations": {kind: asdict(x) for kind, x in report.fit.calibrations.items()},
            "checked": [
                {"workload": one.measured.name, "cp_size": one.measured.cp_size,
                 "measured_us": one.measured.step_us, "predicted_us": one.predicted_us,
                 "error": one.error, "is_fitted": one.is_fitted}
                for one in report.fit.checked
            ],
            "projected": [asdict(one) for one in report.projected],
        }  # fmt: skip
        write_whole(args.json, json.dumps(figures, indent=1))
    if args.markdown:
        write_whole(args.markdown, text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; bad input is one line."""
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the ranks too
    try:
        print(run(args), end="")
    except ValueError as error:
        print(f"bench_scaling.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
