"""From measured steps of small groups to the terms of a projection, and the projection itself.

The model is that of `plan_blocks.py --simulate`: pairs, rows, runs and a base for compute, a link
for rows that travel, stages that overlap. Each kind of workload has its own time of a pair; all
else is shared. The terms are those with the least sum of squared logarithms of predicted over
measured time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from cp_workloads import Workload
from plan_simulate import simulate
from scaling_cases import KINDS

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Machine, Plan, make_plan
from megatron_splitkv.plan.predict import (
    Calibration,
    LayerLoad,
    Network,
    layer_load,
    predict_load,
)
from megatron_splitkv.plan.report import report_plan

COMPUTE_TERMS = ("row_ns", "run_ns", "base_ns")
LINK_TERMS = ("link_gb_per_s", "link_latency_us")
# Where the search begins; a device without a measured group keeps the link.
FIRST = {"row_ns": 5.0, "run_ns": 500.0, "base_ns": 1e5}
FIRST_STEP, LAST_STEP = 2.0, 1.002  # factors by which a term is tried larger and smaller
LEAST_POINTS = 2  # of a kind: one is met exactly by its own time of a pair
NODE_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step of ours.

    Attributes:
        kind: of `KINDS`.
        name: of the workload.
        cp_size: ranks.
        load: what each rank had to do.
        step_us: forward and backward, slowest rank.
    """

    kind: str
    name: str
    cp_size: int
    load: LayerLoad
    step_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A measured step beside its prediction.

    Attributes:
        measured: the step.
        predicted_us: of the fitted terms.
        is_fitted: whether the step was one that the terms were fitted to.
    """

    measured: Measured
    predicted_us: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return self.predicted_us / self.measured.step_us - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What measured steps say of the terms.

    Attributes:
        calibrations: the terms of each kind that has enough points.
        checked: every step of those kinds beside its prediction.
        missing: what a fit of all kinds lacks, in one line, or "".
    """

    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    checked: Sequence[Checked] = ()
    missing: str = ""


def plan_of(workload: Workload, cp_size: int, machine: Machine | None = None) -> Plan:
    """The plan that the method makes, by default on ranks that are all alike."""
    config = SplitKVConfig()
    return make_plan(
        workload.doc_lens,
        cp_size,
        queries=workload.queries,
        block_size=config.block_size,
        route=workload.route(cp_size),
        tolerance=config.balance_tolerance,
        machine=machine,
    )


def measured_of(
    kind: str, workload: Workload, cp_size: int, dtype: str, step_ms: float
) -> Measured:
    """A step with the load of its plan."""
    load = layer_load(plan_of(workload, cp_size), workload.shape(dtype), SplitKVConfig())
    return Measured(
        kind=kind, name=workload.name, cp_size=cp_size, load=load, step_us=step_ms * 1e3
    )


def fit(measured: Sequence[Measured], first: Calibration) -> Fit:
    """Terms of each kind, fitted to all groups but the largest, if more points than terms are left.

    Args:
        measured: steps of ours. The largest group is left out and only predicted, unless there is
            no other.
        first: device, dtype and heads; its link is kept if no fitted group has two ranks.
    Returns:
        The terms of each kind that was fitted, their steps, and what is missing.
    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("no step was measured, so there is nothing to fit")
    sizes = sorted({one.cp_size for one in measured})
    largest = sizes[-1] if len(sizes) > 1 else math.inf
    fitted = [one for one in measured if one.cp_size < largest]
    points = {kind: sum(one.kind == kind for one in fitted) for kind in KINDS}
    kinds = [kind for kind in KINDS if points[kind] >= LEAST_POINTS]
    fitted = [one for one in fitted if one.kind in kinds]
    has_link = any(one.cp_size > 1 for one in fitted)
    free = [*COMPUTE_TERMS, *(LINK_TERMS if has_link else ()), *kinds]
    if len(fitted) <= len(free):
        kinds, fitted = [], []
    few = [f"{kind} {points[kind]}" for kind in KINDS if kind not in kinds]
    num_terms = len(free) + sum(kind not in free for kind in KINDS)
    missing = (
        f"points to fit: {', '.join(few)}; {LEAST_POINTS} of a kind are needed, and in all more "
        f"than the {num_terms} terms of all kinds"
    )
    if not kinds:
        return Fit(missing=missing)
    terms = _first_terms(fitted, kinds, first)
    terms = _search(terms, free, fitted, first)
    calibrations = {kind: _calibration(terms, kind, first) for kind in kinds}
    checked = [
        Checked(
            measured=one,
            predicted_us=predict_load(one.load, calibrations[one.kind]).layer_us,
            is_fitted=one.cp_size < largest,
        )
        for one in measured
        if one.kind in calibrations
    ]
    worst = max(abs(one.error) for one in checked if one.is_fitted)
    calibrations = {k: replace(c, worst_error=worst) for k, c in calibrations.items()}
    return Fit(calibrations=calibrations, checked=checked, missing=missing if few else "")


def _first_terms(
    fitted: Sequence[Measured], kinds: Sequence[str], first: Calibration
) -> dict[str, float]:
    """The time of a pair from the longest step of one kind, all else as given."""
    terms = dict(FIRST)
    for kind in kinds:
        longest = max((x for x in fitted if x.kind == kind), key=lambda x: int(x.load.pairs.max()))
        terms[kind] = longest.step_us * 1e3 / max(1, int(longest.load.pairs.max()))
    return terms | {name: float(getattr(first, name)) for name in LINK_TERMS}


def _search(
    terms: dict[str, float], free: Sequence[str], fitted: Sequence[Measured], first: Calibration
) -> dict[str, float]:
    """Tries every free term and every two of them larger and smaller, by less and less, and keeps
    what is better. Two at once, as terms make up for each other.
    """
    kinds = {one.kind for one in fitted}

    def loss(tried: Mapping[str, float]) -> float:
        calibrations = {kind: _calibration(tried, kind, first) for kind in kinds}
        return sum(
            math.log(predict_load(one.load, calibrations[one.kind]).layer_us / one.step_us) ** 2
            for one in fitted
        )

    best, step = loss(terms), FIRST_STEP
    while step > LAST_STEP:
        before = best
        for names in (*combinations(free, 1), *combinations(free, 2)):
            for factors in product((step, 1.0 / step), repeat=len(names)):
                changed = zip(names, factors, strict=True)
                tried = terms | {name: terms[name] * factor for name, factor in changed}
                found = loss(tried)
                if found < best:
                    terms, best = tried, found
        if best > 0.999 * before:
            step = math.sqrt(step)
    return terms


def _calibration(terms: Mapping[str, float], kind: str, first: Calibration) -> Calibration:
    shared = {name: terms[name] for name in (*COMPUTE_TERMS, *LINK_TERMS)}
    return replace(first, pair_ns=terms[kind], **shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A layer of a group that was not measured.

    Attributes:
        kind: of `KINDS`.
        tokens_per_rank: context tokens.
        cp_size: ranks.
        layer_us: predicted.
        share: an even share of one GPU's best measured rate, over this.
    """

    kind: str
    tokens_per_rank: int
    cp_size: int
    layer_us: float
    share: float


def project(
    kind: str,
    workload: Workload,
    calibration: Calibration,
    network_gb_per_s: float,
    ideal_pairs_per_us: float,
) -> list[Projected]:
    """Weak scaling on nodes of 8, from one node to 1024 ranks.

    Args:
        workload: of one node; more nodes lengthen or repeat its documents.
        network_gb_per_s: of a rank, between nodes.
        ideal_pairs_per_us: of one GPU, as measured.
    """
    machine = Machine(ranks_per_node=NODE_RANKS)
    plan = plan_of(workload, NODE_RANKS, machine)
    report = report_plan(plan, workload.shape(calibration.dtype), SplitKVConfig())
    network = Network(ranks_per_node=NODE_RANKS, gb_per_s=network_gb_per_s)
    tolerance = SplitKVConfig().balance_tolerance
    steps = simulate(plan, report, calibration, machine, tolerance, network)
    first_rate = sum(plan.costs) / NODE_RANKS / steps[0].layer_us
    return [
        Projected(
            kind=kind,
            tokens_per_rank=workload.num_tokens // NODE_RANKS,
            cp_size=step.cp_size,
            layer_us=step.layer_us,
            share=step.efficiency * first_rate / ideal_pairs_per_us,
        )
        for step in steps
    ]
