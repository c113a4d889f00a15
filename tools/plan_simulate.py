"""A projection of layer time to more ranks, from a calibration. Nothing of it is measured."""

from dataclasses import dataclass, replace

from rich.table import Table

from megatron_splitkv.plan import Machine, Plan, Queries, make_plan
from megatron_splitkv.plan.predict import Calibration, Network, predict_layer
from megatron_splitkv.plan.queries import Anchors
from megatron_splitkv.plan.report import PlanReport

MAX_SIMULATED_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One size of the group.

    Attributes:
        cp_size: ranks.
        num_tokens: of the pack: as many for each rank as in the plan that is scaled.
        num_documents: of the pack.
        compute_us, exchange_us, layer_us: as in `Prediction`.
        efficiency: layer time a pair of the smallest group, over that of this one.
    """

    cp_size: int
    num_tokens: int
    num_documents: int
    compute_us: float
    exchange_us: float
    layer_us: float
    efficiency: float


def _grown(plan: Plan, times: int) -> tuple[tuple[int, ...], Queries]:
    """One document grows longer, several grow more."""
    if len(plan.doc_lens) > 1:
        copies = plan.repeated(times)
        return copies.doc_lens, copies.queries
    queries = plan.queries
    if isinstance(queries, Anchors):
        longer = (tuple(position * times for position in anchors) for anchors in queries.positions)
        queries = Anchors(tuple(longer), queries.rows_per_anchor)
    return tuple(length * times for length in plan.doc_lens), queries


def simulate(
    plan: Plan,
    report: PlanReport,
    calibration: Calibration,
    machine: Machine,
    tolerance: float,
    network: Network | None = None,
) -> list[Step]:
    """Weak scaling from the plan's group to 1024 ranks, doubling.

    Args:
        machine, tolerance: what the plan was made with; more ranks repeat the speeds.
        network: as in `predict_layer`.
    Raises:
        ValueError: the plan's own group is larger, or as `predict_layer`.
    """
    if plan.cp_size > MAX_SIMULATED_RANKS:
        raise ValueError(f"--simulate goes to {MAX_SIMULATED_RANKS} ranks, --cp {plan.cp_size}")
    steps: list[Step] = []
    best = 0.0
    times = 1
    while plan.cp_size * times <= MAX_SIMULATED_RANKS:
        lens, queries = _grown(plan, times)
        cp_size = plan.cp_size * times
        speeds = machine.rank_speeds * times
        grown = make_plan(
            lens,
            cp_size,
            queries=queries,
            block_size=report.config.block_size,
            route=plan.route,
            tolerance=tolerance,
            machine=replace(machine, rank_speeds=speeds),
        )
        found = predict_layer(grown, report.shape, report.config, calibration, speeds, network)
        rate = sum(grown.costs) / cp_size / found.layer_us if found.layer_us else 0.0
        best = best or rate
        steps.append(
            Step(
                cp_size=cp_size,
                num_tokens=grown.num_tokens,
                num_documents=len(lens),
                compute_us=found.compute_us,
                exchange_us=found.exchange_us,
                layer_us=found.layer_us,
                efficiency=rate / best if best else 1.0,
            )
        )
        times *= 2
    return steps


def table_of_steps(
    steps: list[Step], calibration: Calibration, network: Network | None = None
) -> Table:
    """The projection as a table that says what it is."""
    nodes = (
        ""
        if network is None
        else (
            f"; between nodes of {network.ranks_per_node} ranks {network.gb_per_s:g} GB/s, as given"
        )
    )
    table = Table(
        "ranks", "tokens", "documents", "compute", "exchange", "layer", "efficiency",
        title="PROJECTION of one attention layer, forward and backward, in ms; not measured",
        pad_edge=False,
        caption=f"calibration: {calibration.device}, {calibration.dtype}, head dim "
        f"{calibration.head_dim}; link {calibration.link_gb_per_s:g} GB/s as given{nodes}",
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for step in steps:
        table.add_row(
            f"{step.cp_size:,}", f"{step.num_tokens:,}", f"{step.num_documents:,}",
            f"{step.compute_us / 1e3:,.2f}", f"{step.exchange_us / 1e3:,.2f}",
            f"{step.layer_us / 1e3:,.2f}", f"{step.efficiency:.1%}",
        )  # fmt: skip
    return table
