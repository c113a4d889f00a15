"""Plans the KV tokens of packs of documents and shows who gets what. No torch, no GPU.

examples:
  python tools/plan_blocks.py --lengths 20000,12000,768 --cp 4
  python tools/plan_blocks.py --lengths 131072 --cp 8 --heads 32/8 --window 4096 --compare
  python tools/plan_blocks.py --distribution wlb --tokens 1048576 --cp 64 --packs 20 --plot plan.png
  python tools/plan_blocks.py --file lengths.csv --cp 8 --json
  python tools/plan_blocks.py --idx data/text --seq-length 8192 --samples 1000 --packs 8 --cp 4
  python tools/plan_blocks.py --lengths 262144 --cp 8 --calibration h200.json --tolerance auto
  python tools/plan_blocks.py --lengths 65536,4096 --cp 8 --calibration h200.json --simulate
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from plan_baselines import Problem, baselines_of, contiguous, document_zig_zag, judge, zig_zag
from plan_inputs import Pack
from plan_options import (
    MAX_CP_SIZE,
    add_bytes_options,
    add_pack_options,
    add_plan_options,
    machine_of,
    network_of,
    packs_of,
    query_spec,
    refuse_idle_options,
    route_of,
    shape_of,
)
from plan_simulate import Step, simulate, table_of_steps
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Plan, make_plan
from megatron_splitkv.plan.predict import (
    Calibration,
    Prediction,
    make_plan_by_time,
    predict_layer,
    read_calibration,
)
from megatron_splitkv.plan.report import (
    PlanReport,
    kv_ring_bytes,
    max_over_mean,
    report_plan,
)

BEFORE = {"contiguous": contiguous, "zig-zag": zig_zag, "per-document zig-zag": document_zig_zag}
PROGRESS_PACKS = 8  # fewer are planned before a bar is seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and its figures.

    Attributes:
        plan, report: of one pack.
        planning_ms: time of `make_plan`.
        tolerance: the one asked for, or the one that was chosen.
        predictions: with a calibration, of the tolerance and, where it was chosen, of all others.
    """

    plan: Plan
    report: PlanReport
    planning_ms: float
    tolerance: float
    predictions: dict[float, Prediction]


def build_parser() -> argparse.ArgumentParser:
    """All options, with defaults in the help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pack_options(parser)
    add_plan_options(parser)
    add_bytes_options(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=Path, metavar="PATH", help="draw the plan, as in plan.png (matplotlib)")
    add("--compare", action="store_true", help="place the pack in other ways too")
    add(
        "--simulate",
        action="store_true",
        help="project layer time and weak scaling to 1024 ranks from the calibration",
    )
    return parser


def plan_pack(args: argparse.Namespace, pack: Pack, calibration: Calibration | None) -> Planned:
    """Plans one pack as the options say.

    Raises:
        ValueError: what the library refuses.
    """
    is_auto = args.tolerance == "auto"
    shape, queries = shape_of(args), query_spec(args, pack)
    config = SplitKVConfig(
        block_size=args.block_size,
        route=route_of(args, shape, queries),
        num_stages=args.stages,
        partial_dtype=args.partial_dtype,
        keep_queries=args.keep_queries,
        balance_tolerance=0.001 if is_auto else args.tolerance,
    )
    machine = machine_of(args, calibration.machine if calibration else None)
    predictions: dict[float, Prediction] = {}
    start = time.perf_counter()
    if is_auto:
        if calibration is None:
            raise ValueError("--tolerance auto needs --calibration PATH; see tools/calibrate.py")
        plan, tolerance, predictions = make_plan_by_time(
            pack,
            args.cp,
            shape=shape,
            config=config,
            calibration=calibration,
            queries=queries,
            machine=machine,
            network=network_of(args),
        )
    else:
        tolerance = config.balance_tolerance
        plan = make_plan(
            pack,
            args.cp,
            queries=queries,
            block_size=config.block_size,
            route=config.route,
            tolerance=tolerance,
            machine=machine,
        )
    planning_ms = (time.perf_counter() - start) * 1e3
    if calibration is not None and not is_auto:
        predicted = predict_layer(
            plan, shape, config, calibration, machine.rank_speeds, network_of(args)
        )
        predictions = {tolerance: predicted}
    return Planned(
        plan=plan,
        report=report_plan(plan, shape, config),
        planning_ms=planning_ms,
        tolerance=tolerance,
        predictions=predictions,
    )


def problem_of(planned: Planned) -> Problem:
    """The pack of a plan, for the baselines."""
    plan = planned.plan
    return Problem(
        lens=plan.doc_lens, cp_size=plan.cp_size, queries=plan.queries, block_size=plan.block_size,
        route=plan.route,
    )  # fmt: skip


def plan_all(
    args: argparse.Namespace, packs: list[Pack], calibration: Calibration | None
) -> list[Planned]:
    """Plans every pack, with a progress bar where that takes a while."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=len(packs) < PROGRESS_PACKS) as bar:
        return [plan_pack(args, pack, calibration) for pack in bar.track(packs, description="")]


def comparison_table(planned: Planned) -> Table:
    """The pack placed in other ways, and by us."""
    table = Table("placement", "imbalance", "token drift", "rows sent", "runs", title="compared")
    for column in table.columns[1:]:
        column.justify = "right"
    problem = problem_of(planned)
    plans = {name: make(problem) for name, make in baselines_of(problem).items()}
    for name, plan in (plans | {"split-KV": planned.plan}).items():
        found = judge(plan)
        table.add_row(
            name, f"{found.imbalance:.3%}", f"{found.token_drift:.3%}", f"{found.rows:.3f}",
            f"{found.num_runs:,}",
        )  # fmt: skip
    table.caption = (
        f"rows sent: rows of {planned.plan.route} that travel in a layer, for each query row of "
        "the pack"
    )
    return table


def ring_line(report: PlanReport, ring: tuple[int, int]) -> str:
    """One line: mean bytes of a rank, here and with a KV ring, and what the ring is taken to be."""
    cp_size, dtype = len(report.cost), report.shape.dtype

    def megabytes(forward: int, backward: int) -> str:
        return f"{forward / cp_size / 1e6:.2f} MB fwd, {backward / cp_size / 1e6:.2f} MB bwd"

    split_kv = megabytes(sum(report.bytes_forward), sum(report.bytes_backward))
    return (
        f"mean of a rank: Split-KV {split_kv}; KV ring or all-gather {megabytes(*ring)} "
        f"({report.shape.num_heads_kv} kv heads, dense: every rank gets all keys; k, v, dk, dv in "
        f"{dtype})"
    )


def imbalances(planned: Planned) -> dict[str, float]:
    """Cost imbalance, max/mean - 1, of what Megatron does otherwise and of the plan."""
    problem = problem_of(planned)
    before = {name: judge(make(problem)).imbalance for name, make in BEFORE.items()}
    return before | {"planned": planned.report.cost_max_over_mean - 1.0}


def prediction_lines(planned: Planned) -> list[str]:
    """The predicted layer times, the chosen one marked."""
    return [
        f"predicted, not measured, tolerance {tolerance:g}: layer {found.layer_us:,.1f} us "
        f"(compute {found.compute_us:,.1f}, exchange {found.exchange_us:,.1f})"
        + (" <- taken" if tolerance == planned.tolerance and len(planned.predictions) > 1 else "")
        for tolerance, found in planned.predictions.items()
    ]


def all_packs_line(all_planned: list[Planned]) -> str:
    """One line about all packs."""
    ratios = [max_over_mean(planned.plan.costs) - 1.0 for planned in all_planned]
    milliseconds = statistics.median(planned.planning_ms for planned in all_planned)
    return (
        f"{len(all_planned)} packs: imbalance median {statistics.median(ratios):.4%}, worst "
        f"{max(ratios):.4%} (pack {int(np.argmax(ratios)) + 1}); planned in {milliseconds:.3f} ms "
        "(median)"
    )


def print_report(args: argparse.Namespace, shown: Planned, all_planned: list[Planned]) -> None:
    """Tables and lines for a reader."""
    console = Console(highlight=False)
    plan, report = shown.plan, shown.report
    ring = kv_ring_bytes(plan, report.shape)
    console.print(report.as_table())
    console.print(ring_line(report, ring))
    console.print(
        "imbalance: " + ", ".join(f"{name} {x:.3%}" for name, x in imbalances(shown).items())
    )
    console.print(
        f"{len(plan.doc_lens)} documents, {report.whole_documents} whole on one rank; "
        f"block size {plan.block_size}; route {plan.route}; planned in {shown.planning_ms:.3f} ms; "
        f"plan {plan.fingerprint}"
    )
    for line in prediction_lines(shown):
        console.print(line)
    if len(all_planned) > 1:
        console.print(all_packs_line(all_planned))
    if args.compare:
        console.print(comparison_table(shown))


def json_of(
    args: argparse.Namespace, shown: Planned, all_planned: list[Planned]
) -> dict[str, object]:
    """What `--json` prints."""
    plan, report = shown.plan, shown.report
    ring = kv_ring_bytes(plan, report.shape)
    figures: dict[str, object] = report.as_dict() | {
        "ring_bytes_forward": ring[0],
        "ring_bytes_backward": ring[1],
        "planning_ms": shown.planning_ms,
        "block_size": plan.block_size,
        "tolerance": shown.tolerance,
        "imbalance": imbalances(shown),
        "runs": plan.runs.tolist(),
    }
    if shown.predictions:
        figures["predicted"] = {f"{t:g}": asdict(x) for t, x in shown.predictions.items()}
    if len(all_planned) > 1:
        figures["packs"] = [
            {
                "fingerprint": planned.plan.fingerprint,
                "cost_max_over_mean": planned.report.cost_max_over_mean,
                "planning_ms": planned.planning_ms,
            }
            for planned in all_planned
        ]
    if args.compare:
        problem = problem_of(shown)
        plans = {name: make(problem) for name, make in baselines_of(problem).items()}
        figures["compared"] = {name: asdict(judge(found)) for name, found in plans.items()}
    return figures


def run(args: argparse.Namespace) -> None:
    """Plans, reports, draws, projects.

    Raises:
        ValueError: bad input, named.
        OSError: a file cannot be read or written.
    """
    if args.cp > MAX_CP_SIZE:
        raise ValueError(f"--cp {args.cp} must be at most {MAX_CP_SIZE} ranks")
    calibration = read_calibration(args.calibration) if args.calibration else None
    if args.simulate and calibration is None:
        raise ValueError("--simulate needs --calibration PATH; see tools/calibrate.py")
    network = network_of(args)
    packs = packs_of(args)
    if not 1 <= args.pack <= len(packs):
        raise ValueError(f"--pack {args.pack} must lie in [1, {len(packs)}]")
    all_planned = plan_all(args, packs, calibration)
    shown = all_planned[args.pack - 1]
    if args.plot:
        from plan_figure import plot_plan

        plot_plan(shown.plan, contiguous(problem_of(shown)).costs, args.plot)
    steps: list[Step] = []
    if args.simulate and calibration is not None:
        machine = machine_of(args, calibration.machine)
        steps = simulate(shown.plan, shown.report, calibration, machine, shown.tolerance, network)
    if args.json:
        figures = json_of(args, shown, all_planned)
        if steps:
            figures["projection"] = [asdict(step) for step in steps]
        print(json.dumps(figures))
    else:
        print_report(args, shown, all_planned)
        if steps and calibration is not None:
            table = table_of_steps(steps, calibration, network)
            Console(highlight=False).print(table)


def main() -> int:
    """Returns the exit code; bad input is one line."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        refuse_idle_options(args, parser)
        run(args)
    except (ValueError, OSError) as error:
        print(f"plan_blocks.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
