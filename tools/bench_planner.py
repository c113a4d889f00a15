"""The planner beside other placements: balance, token drift, rows sent, runs, time. One thread.

Every placement of a case is judged by the same counts: visible pairs by key, tokens, and query rows
that travel. Times are CPU times of the process: ours with its Python face, the partitioners'
without building their hypergraph, one run each.
The other baselines are short Python programs, so their times are left out. KaHyPar, Mt-KaHyPar and
OR-Tools take part where they are installed (pip install kahypar mtkahypar ortools).

examples:
  python tools/bench_planner.py --markdown
  python tools/bench_planner.py --quick
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from plan_baselines import (
    Problem,
    baselines_of,
    equal_blocks,
    judge,
    key_costs,
    key_lpt,
)
from plan_inputs import draw_pack
from plan_partitioners import PARTITIONERS, block_hypergraph, optimal_makespan, plan_of_ranks
from rich.console import Console
from rich.progress import track

from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Machine,
    Queries,
    Window,
    is_self_attention,
    make_plan,
    plan_exchange,
)
from megatron_splitkv.plan.report import max_over_mean

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.001
MODULES = {"KaHyPar": "kahypar", "Mt-KaHyPar": "mtkahypar", "CP-SAT": "ortools"}
MAX_PARTITIONED_BLOCKS = 1024  # the nets of one causal document hold the square of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pack under a spec; `blocks` is how many blocks it has."""

    name: str
    problem: Problem
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One placement of one case; `ms` is None where it is not timed."""

    case: str
    placement: str
    imbalance: float
    token_drift: float
    rows: float
    num_runs: int
    ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Planning time of a pack, from Python, and the imbalance of the plan."""

    name: str
    ms: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A case planned with all ranks alike, or by nodes; rows over the rows that there are."""

    case: str
    placement: str
    imbalance: float
    rows: float
    rows_between_nodes: float
    ms: float


def case_of(name: str, lens: tuple[int, ...], cp_size: int, queries: Queries, size: int) -> Case:
    """Names a case after what it holds."""
    problem = Problem(lens=lens, cp_size=cp_size, queries=queries, block_size=size)
    blocks = sum(-(-length // size) for length in lens)
    title = f"{name}, T {sum(lens):,}, cp {cp_size}, block {size} ({blocks} blocks)"
    return Case(name=title, problem=problem, blocks=blocks)


def anchors_of(lens: tuple[int, ...], count: int, rng: np.random.Generator) -> Anchors:
    """Uniform anchors in each document, 16 rows each."""
    drawn = (np.sort(rng.integers(0, length + 1, count)).tolist() for length in lens)
    return Anchors(tuple(map(tuple, drawn)), 16)


def cases(is_quick: bool) -> Iterator[Case]:
    """Length distributions over group and block sizes, one document, windows, anchors."""
    rng = np.random.default_rng(42)
    for name in ("prolong", "wlb", "web", "trajectories"):
        for cp_size, num_tokens in ((8, 131_072), (64, 1 << 20), (256, 1 << 22)):
            if is_quick and cp_size > 8:
                continue
            lens = draw_pack(name, num_tokens, rng)
            sizes = (128, 512, 4096) if cp_size == 8 else (512,)
            for size in sizes[-1:] if is_quick else sizes:
                yield case_of(name, lens, cp_size, Causal(), size)
    one = (131_072,)
    yield case_of("one document", one, 8, Causal(), 512)
    yield case_of("one document, window 4096", one, 8, Window(4096), 512)
    yield case_of("one document, 512 anchors", one, 8, anchors_of(one, 512, rng), 512)
    if not is_quick:
        yield case_of("one document", (1 << 20,), 64, Causal(), 1024)
        lens = draw_pack("trajectories", 1 << 20, rng)
        yield case_of("trajectories, 64 anchors each", lens, 64, anchors_of(lens, 64, rng), 512)


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of this process: one thread, whatever else the machine does."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def rows_of(case: Case) -> Iterator[Row]:
    """All placements of a case, ours last."""
    problem = case.problem
    for name, make in baselines_of(problem).items():
        yield Row(case=case.name, placement=name, **asdict(judge(make(problem))), ms=None)
    if is_self_attention(problem.queries) and case.blocks <= MAX_PARTITIONED_BLOCKS:
        for name, ranks_of in PARTITIONERS.items():
            if find_spec(MODULES[name]) is None:
                continue
            graph = block_hypergraph(problem)
            start = time.process_time()
            ranks = ranks_of(graph, problem.cp_size, TOLERANCE)
            ms = (time.process_time() - start) * 1e3
            found = judge(plan_of_ranks(problem, graph, ranks))
            yield Row(case=case.name, placement=name, **asdict(found), ms=ms)
    ours = partial(
        make_plan,
        problem.lens,
        problem.cp_size,
        queries=problem.queries,
        block_size=problem.block_size,
    )
    ms = median_ms(ours, 51)
    yield Row(case=case.name, placement="split-KV", **asdict(judge(ours())), ms=ms)


def node_rows(all_cases: list[Case], ranks_per_node: int) -> Iterator[NodeRow]:
    """Causal cases of several documents and nodes, planned without and with the nodes."""
    for case in all_cases:
        problem = case.problem
        is_causal = isinstance(problem.queries, Causal) and len(problem.lens) > 1
        if not is_causal or problem.cp_size <= ranks_per_node:
            continue
        node = np.arange(problem.cp_size) // ranks_per_node
        is_far = node[:, None] != node[None, :]
        for placement, machine in (
            ("ranks alike", Machine()),
            (f"nodes of {ranks_per_node}", Machine(ranks_per_node=ranks_per_node)),
        ):
            ours = partial(
                make_plan,
                problem.lens,
                problem.cp_size,
                block_size=problem.block_size,
                machine=machine,
            )
            plan = ours()
            found = judge(plan)
            far = plan_exchange(plan).travelling()[is_far].sum() / sum(problem.lens)
            yield NodeRow(
                case=case.name,
                placement=placement,
                imbalance=found.imbalance,
                rows=found.rows,
                rows_between_nodes=float(far),
                ms=median_ms(ours, 11),
            )


def speed_rows() -> Iterator[SpeedRow]:
    """Planning time and balance of many blocks."""
    rng = np.random.default_rng(42)
    drawn = draw_pack("prolong", 131_072, rng)
    large = draw_pack("prolong", 1 << 20, rng)
    equal = tuple(rng.integers(128, 1024, 8192).tolist())
    million = tuple(rng.integers(128, 1024, 1_000_000).tolist())
    prolong, wlb = (draw_pack(name, 128_000_000, rng) for name in ("prolong", "wlb"))
    for name, lens, cp_size, size, repeats in (
        (f"{len(drawn)} ProLong documents, 128 K tokens, cp 8", drawn, 8, 512, 201),
        (f"8192 blocks of 128: {len(large)} documents, cp 64", large, 64, 128, 51),
        ("8192 blocks: one document, cp 64", (8192 * 512,), 64, 512, 51),
        ("8192 documents of one block, cp 64", equal, 64, 1024, 51),
        ("1 M blocks: one document, cp 1024", (1_000_000 * 512,), 1024, 512, 21),
        (f"1 M blocks: {len(prolong):,} ProLong documents, cp 1024", prolong, 1024, 128, 5),
        (f"1 M blocks: {len(wlb):,} WLB-LLM documents, cp 1024", wlb, 1024, 128, 5),
        ("1 M documents of one block, cp 1024", million, 1024, 1024, 5),
    ):
        plan = partial(make_plan, lens, cp_size, block_size=size)
        imbalance = max_over_mean(plan().costs) - 1.0
        yield SpeedRow(name=name, ms=median_ms(plan, repeats), imbalance=imbalance)


def optimum_line(num_instances: int) -> str:
    """Small instances of indivisible blocks against their exact optimum."""
    rng = np.random.default_rng(7)
    block_worst = planned_worst = 0.0
    solved = 0
    for _ in track(range(num_instances), "optimum", console=Console(stderr=True), transient=True):
        cp_size = int(rng.integers(2, 5))
        lens = tuple(int(x) * 64 for x in rng.integers(1, 7, int(rng.integers(2, 4))))
        problem = Problem(lens=lens, cp_size=cp_size, queries=Causal(), block_size=64)
        by_block = key_lpt(problem)
        costs = key_costs(problem, equal_blocks(problem)).tolist()
        best = optimal_makespan(costs, cp_size)
        if best is None:
            continue
        solved += 1
        block_worst = max(block_worst, max(by_block.costs) / best)
        planned = make_plan(lens, cp_size, block_size=64)
        planned_worst = max(planned_worst, max(planned.costs) / best)
    return (
        f"{solved} of {num_instances} random instances solved to optimality (CP-SAT, blocks of 64 "
        f"kept whole): LPT of blocks at most {block_worst:.4f} of the optimum, ours, which may cut "
        f"a block, at most {planned_worst:.4f}"
    )


def environment() -> str:
    """Commit, processor and versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"commit {commit or 'unknown'}, {processor}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}"
    )


def print_markdown(
    rows: list[Row], nodes: list[NodeRow], speeds: list[SpeedRow], optimum: str | None
) -> None:
    """Tables for a results file."""
    print(
        f"{environment()}\n\n| planning, from Python | median CPU ms | imbalance |\n|---|--:|--:|"
    )
    for speed in speeds:
        print(f"| {speed.name} | {speed.ms:.3f} | {speed.imbalance:.4%} |")
    if optimum:
        print(f"\n{optimum}.")
    print("\n### Nodes\n\n| case | placement | imbalance | rows sent | between nodes | CPU ms |")
    print("|---|---|--:|--:|--:|--:|")
    for node in nodes:
        print(
            f"| {node.case} | {node.placement} | {node.imbalance:.3%} | {node.rows:.3f} | "
            f"{node.rows_between_nodes:.3f} | {node.ms:,.3f} |"
        )
    for case in dict.fromkeys(row.case for row in rows):
        print(f"\n### {case}\n")
        print("| placement | imbalance | token drift | rows sent | runs | CPU ms |")
        print("|---|--:|--:|--:|--:|--:|")
        for row in rows:
            if row.case == case:
                ms = "" if row.ms is None else f"{row.ms:,.3f}"
                print(
                    f"| {row.placement} | {row.imbalance:.3%} | {row.token_drift:.3%} | "
                    f"{row.rows:.3f} | {row.num_runs:,} | {ms} |"
                )


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="tables (default)")
    form.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="cp 8 alone, few instances")
    return parser


def main() -> int:
    """Runs all cases and prints them."""
    args = build_parser().parse_args()
    console = Console(stderr=True)
    all_cases = list(cases(args.quick))
    rows = [
        row
        for case in track(all_cases, "cases", console=console, transient=True)
        for row in rows_of(case)
    ]
    nodes = list(node_rows(all_cases, ranks_per_node=4 if args.quick else 8))
    speeds = [] if args.quick else list(speed_rows())
    has_solver = find_spec(MODULES["CP-SAT"]) is not None
    optimum = optimum_line(20 if args.quick else 1000) if has_solver else None
    if args.json:
        found = {"rows": rows, "nodes": nodes, "speeds": speeds}
        print(json.dumps({name: [asdict(row) for row in table] for name, table in found.items()}))
    else:
        print_markdown(rows, nodes, speeds, optimum)
    return 0


if __name__ == "__main__":
    sys.exit(main())
