"""General partitioners on the block hypergraph, and exact optima: optional baselines of the bench.

The hypergraph has a vertex for each block of keys, weighted by its visible pairs, and a net for
each block of queries: the block itself and all that it sees, weighted by its rows. Minimising the
connectivity of the nets minimises the rows that travel, as in DCP (Jiang et al. 2025), whose
vertices also split a block's pairs by query block; the balance is that of split-KV.
"""

import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from plan_baselines import Int64Array, Problem, equal_blocks, key_costs, plan_of_blocks

from megatron_splitkv.plan import Plan

MAX_WEIGHT = 1 << 30  # vertex weights are 32 bits in both partitioners, their sum too
SEED = 1

# Settings of KaHyPar's direct k-way mode for the connectivity metric, with k-way FM refinement.
KAHYPAR_INI = """\
mode=direct
objective=km1
seed=1
cmaxnet=1000
vcycles=0
p-use-sparsifier=true
p-sparsifier-min-median-he-size=28
p-sparsifier-max-hyperedge-size=1200
p-sparsifier-max-cluster-size=10
p-sparsifier-min-cluster-size=2
p-sparsifier-num-hash-func=5
p-sparsifier-combined-num-hash-func=100
p-detect-communities=true
p-detect-communities-in-ip=true
p-reuse-communities=false
p-max-louvain-pass-iterations=100
p-min-eps-improvement=0.0001
p-louvain-edge-weight=hybrid
c-type=ml_style
c-s=1
c-t=160
c-rating-score=heavy_edge
c-rating-use-communities=true
c-rating-heavy_node_penalty=no_penalty
c-rating-acceptance-criterion=best_prefer_unmatched
c-fixed-vertex-acceptance-criterion=fixed_vertex_allowed
i-mode=recursive
i-technique=multi
i-c-type=ml_style
i-c-s=1
i-c-t=150
i-c-rating-score=heavy_edge
i-c-rating-use-communities=true
i-c-rating-heavy_node_penalty=no_penalty
i-c-rating-acceptance-criterion=best_prefer_unmatched
i-c-fixed-vertex-acceptance-criterion=fixed_vertex_allowed
i-bp-algorithm=worst_fit
i-bp-heuristic-prepacking=false
i-bp-early-restart=true
i-bp-late-restart=true
i-algo=pool
i-runs=20
i-r-type=twoway_fm
i-r-runs=-1
i-r-fm-stop=simple
i-r-fm-stop-i=50
r-type=kway_fm_km1
r-runs=-1
r-fm-stop=adaptive_opt
r-fm-stop-alpha=1
r-fm-stop-i=350
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHypergraph:
    """Blocks `[n, 3]`, vertex weights `[n]`, and nets as CSR with their weights."""

    blocks: Int64Array
    weights: list[int]
    pointers: list[int]
    pins: list[int]
    net_weights: list[int]


def block_hypergraph(problem: Problem) -> BlockHypergraph:
    """The hypergraph of a self-attention problem."""
    blocks = equal_blocks(problem)
    costs = key_costs(problem, blocks)
    scale = max(1.0, costs.sum() / MAX_WEIGHT)
    intervals = problem.model.row_intervals()
    starts = np.concatenate([[0], np.cumsum(problem.lens, dtype=np.int64)])
    first = starts[blocks[:, 0]] + blocks[:, 1]
    last = starts[blocks[:, 0]] + blocks[:, 2]
    pointers, pins = [0], list[int]()
    for i in range(len(blocks)):
        seen = intervals[first[i] : last[i]]
        begin = int(np.searchsorted(last, seen[:, 0].min(), side="right"))
        end = int(np.searchsorted(first, seen[:, 1].max(), side="left"))
        pins += sorted({*range(begin, end), i})
        pointers.append(len(pins))
    return BlockHypergraph(
        blocks=blocks,
        weights=np.maximum(1, (costs / scale).astype(np.int64)).tolist(),
        pointers=pointers,
        pins=pins,
        net_weights=(blocks[:, 2] - blocks[:, 1]).tolist(),
    )


def kahypar_ranks(graph: BlockHypergraph, cp_size: int, tolerance: float) -> list[int]:
    """Rank of each block, by KaHyPar (Schlag et al. 2022; `pip install kahypar`)."""
    kahypar: Any = import_module("kahypar")
    hypergraph = kahypar.Hypergraph(
        len(graph.blocks), len(graph.net_weights), graph.pointers, graph.pins, cp_size,
        graph.net_weights, graph.weights,
    )  # fmt: skip
    context = kahypar.Context()
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "km1.ini"
        ini.write_text(KAHYPAR_INI)
        context.loadINIconfiguration(str(ini))
    context.setK(cp_size)
    context.setEpsilon(tolerance)
    context.setSeed(SEED)
    context.suppressOutput(True)
    kahypar.partition(hypergraph, context)
    return [hypergraph.blockID(block) for block in range(len(graph.blocks))]


@cache
def _one_thread() -> object:
    """Mt-KaHyPar's library object, which a process may make once."""
    return import_module("mtkahypar").initialize(1)


def mt_kahypar_ranks(graph: BlockHypergraph, cp_size: int, tolerance: float) -> list[int]:
    """Rank of each block, by Mt-KaHyPar on one thread (Gottesbueren et al. 2024)."""
    mtkahypar: Any = import_module("mtkahypar")
    library: Any = _one_thread()
    mtkahypar.set_seed(SEED)
    context = library.context_from_preset(mtkahypar.PresetType.DEFAULT)
    context.set_partitioning_parameters(cp_size, tolerance, mtkahypar.Objective.KM1)
    context.logging = False
    nets = [
        graph.pins[graph.pointers[i] : graph.pointers[i + 1]] for i in range(len(graph.net_weights))
    ]
    hypergraph = library.create_hypergraph(
        context, len(graph.blocks), len(nets), nets, graph.weights, graph.net_weights
    )
    found = hypergraph.partition(context)
    return [found.block_id(block) for block in range(len(graph.blocks))]


PARTITIONERS = {"KaHyPar": kahypar_ranks, "Mt-KaHyPar": mt_kahypar_ranks}


def plan_of_ranks(problem: Problem, graph: BlockHypergraph, ranks: list[int]) -> Plan:
    """The plan that a partitioner found."""
    return plan_of_blocks(problem, graph.blocks, np.asarray(ranks, dtype=np.int64))


def optimal_makespan(costs: list[int], cp_size: int, limit_s: float = 10.0) -> int | None:
    """Least largest load of indivisible blocks, by OR-Tools CP-SAT; None where time ran out."""
    cp_model: Any = import_module("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    largest = model.new_int_var(max(costs), sum(costs), "largest")
    on = [[model.new_bool_var(f"{i} on {rank}") for rank in range(cp_size)] for i in costs]
    for row in on:
        model.add_exactly_one(row)
    for rank in range(cp_size):
        load = sum(cost * row[rank] for cost, row in zip(costs, on, strict=True))
        model.add(load <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None
