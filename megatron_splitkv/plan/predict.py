"""From measured kernel times to the predicted time of a layer, and the plan that takes the least.

A prediction ranks plans; it is no measurement. It knows what kernels cost by pairs, rows and runs,
what a link carries, and that an exchange cut into stages overlaps with the work on them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan.plan import Int64Array, Machine, Plan, make_plan
from megatron_splitkv.plan.queries import Queries
from megatron_splitkv.plan.report import AttentionShape, count_traffic

Float64Array = npt.NDArray[np.float64]
# What `tolerance="auto"` chooses from: shares by which the dearest rank may exceed the mean.
AUTO_TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Kernel times of one device, dtype and head dim, forward and backward together.

    Attributes:
        device: name of what was measured.
        dtype: of q, k and v.
        head_dim: elements of a head.
        num_heads_q, num_heads_kv: heads that were measured; times scale with query heads.
        pair_ns: time of a visible query-key pair, all heads together.
        row_ns: time of a query row beside its pairs.
        run_ns: time of a run of keys beside its pairs.
        base_ns: time of a layer beside all that.
        worst_error: largest relative difference between the fit and a measured time.
        link_gb_per_s: what a rank sends in 10^9 bytes a second, as given: it is not measured here.
        link_latency_us: time before the first byte of one stage, as given.
        source: the command, commit and date.
    """

    device: str
    dtype: str
    head_dim: int
    num_heads_q: int
    num_heads_kv: int
    pair_ns: float
    row_ns: float
    run_ns: float
    base_ns: float
    worst_error: float
    link_gb_per_s: float
    link_latency_us: float
    source: str

    def __post_init__(self) -> None:
        for name in ("pair_ns", "link_gb_per_s"):
            _check_number(name, getattr(self, name), is_zero_allowed=False)
        for name in ("row_ns", "run_ns", "base_ns", "worst_error", "link_latency_us"):
            _check_number(name, getattr(self, name), is_zero_allowed=True)

    @property
    def machine(self) -> Machine:
        """Rows and runs in units of pairs, for the planner to balance."""
        return Machine(
            row_pairs=round(self.row_ns / self.pair_ns), run_pairs=round(self.run_ns / self.pair_ns)
        )

    def to_json(self) -> str:
        """One JSON object that `calibration_from_json` reads back."""
        return json.dumps(asdict(self), indent=1)


def _check_number(name: str, value: object, *, is_zero_allowed: bool) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_zero = value == 0 and is_zero_allowed
        if is_zero or 0.0 < value < math.inf:
            return
    least = "at least 0" if is_zero_allowed else "above 0"
    raise ValueError(f"calibration: {name}={value!r} must be a number {least}")


def calibration_from_json(text: str) -> Calibration:
    """Reads what `Calibration.to_json` wrote.

    Raises:
        ValueError: the text is no JSON object with these fields, or a time is no number.
    """
    data: Any = json.loads(text)
    names = {field.name for field in fields(Calibration)}
    if not isinstance(data, dict) or set(cast(dict[str, Any], data)) != names:
        raise ValueError(f"calibration must be a JSON object with the fields {sorted(names)}")
    return Calibration(**cast(dict[str, Any], data))


def read_calibration(path: str | Path) -> Calibration:
    """The calibration in a file.

    Raises:
        ValueError: as `calibration_from_json`, with the name of the file.
        OSError: the file cannot be read.
    """
    try:
        return calibration_from_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}; make it with tools/calibrate.py") from None


def check_measured(calibration: Calibration, shape: AttentionShape) -> None:
    """Refuses a calibration that says nothing about attention of this shape.

    Raises:
        ValueError: it is of another head dim or dtype.
    """
    measured = (calibration.head_dim, calibration.head_dim, calibration.dtype)
    is_square = shape.head_dim_qk == shape.head_dim_v
    way_out = "calibrate with these" if is_square else "none can be measured; leave it out"
    if (shape.head_dim_qk, shape.head_dim_v, shape.dtype) != measured:
        raise ValueError(
            f"calibration of head_dim={calibration.head_dim} and {calibration.dtype} says nothing "
            f"about head dims {shape.head_dim_qk} and {shape.head_dim_v} in {shape.dtype}; "
            f"{way_out}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted times of one attention layer, forward and backward, in microseconds.

    Attributes:
        compute_us: of the rank that computes longest.
        exchange_us: of the rank that sends or receives longest.
        layer_us: of the slowest rank, with the overlap of stages.
    """

    compute_us: float
    exchange_us: float
    layer_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The wire between nodes; the link of a calibration is then that inside a node.

    Attributes:
        ranks_per_node: consecutive ranks of a node.
        gb_per_s: what a rank sends to other nodes in 10^9 bytes a second, beside its link.
    """

    ranks_per_node: int
    gb_per_s: float

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"network: ranks_per_node={self.ranks_per_node} must be at least 1")
        if not 0.0 < self.gb_per_s < math.inf:
            raise ValueError(f"network: gb_per_s={self.gb_per_s} must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """What each rank has to do in one attention layer, forward and backward.

    Attributes:
        pairs: visible query-key pairs, `[cp_size]`.
        rows: query rows that the rank attends with, `[cp_size]`: its own, and where queries travel
            those of others too.
        runs: runs of keys, `[cp_size]`.
        travelling: rows of queries or of keys that each rank sends to each other one,
            `[cp_size, cp_size]`.
        bytes_out, bytes_back: of a travelling row.
        num_heads_q: query heads.
        num_stages: exchanges, one after the other.
    """

    pairs: Int64Array
    rows: Int64Array
    runs: Int64Array
    travelling: Int64Array
    bytes_out: int
    bytes_back: int
    num_heads_q: int
    num_stages: int


def layer_load(plan: Plan, shape: AttentionShape, config: SplitKVConfig) -> LayerLoad:
    """Counts what `predict_load` weighs."""
    traffic = count_traffic(plan, shape, config)
    return LayerLoad(
        pairs=np.asarray(plan.costs, dtype=np.int64),
        rows=traffic.attended,
        runs=np.bincount(plan.runs[:, 0], minlength=plan.cp_size),
        travelling=traffic.rows,
        bytes_out=traffic.forward[0] + traffic.backward[0],
        bytes_back=traffic.forward[1] + traffic.backward[1],
        num_heads_q=shape.num_heads_q,
        num_stages=max(1, traffic.num_exchanges),
    )


def predict_load(
    load: LayerLoad,
    calibration: Calibration,
    rank_speeds: Sequence[float] = (),
    network: Network | None = None,
) -> Prediction:
    """Predicts one attention layer. Compute and exchange overlap but for the first of the stages:
    a rank takes the longer of the two and one stage's part of the shorter.

    Args:
        rank_speeds: as in `Machine`; the fastest rank computes as calibrated.
        network: the wire between nodes, by default one link between all ranks. Rows to ranks of
            the own node and to others travel at once.
    """
    nanoseconds = (
        load.pairs * calibration.pair_ns
        + load.rows * calibration.row_ns
        + load.runs * calibration.run_ns
    )
    compute = nanoseconds * (load.num_heads_q / calibration.num_heads_q) + calibration.base_ns
    if rank_speeds:
        compute *= max(rank_speeds) / np.asarray(rank_speeds)
    compute /= 1e3
    wire = _wire_us(load, calibration.link_gb_per_s, network)
    wire += np.where(wire > 0, 4 * load.num_stages * calibration.link_latency_us, 0.0)
    layer = np.maximum(compute, wire) + np.minimum(compute, wire) / load.num_stages
    return Prediction(
        compute_us=float(compute.max()), exchange_us=float(wire.max()), layer_us=float(layer.max())
    )


def _wire_us(load: LayerLoad, link_gb_per_s: float, network: Network | None) -> Float64Array:
    """How long each rank sends or receives, without latency, `[cp_size]`."""

    def largest_bytes(rows: Int64Array) -> Int64Array:
        # A link carries both directions at once.
        sent, received = rows.sum(axis=1), rows.sum(axis=0)
        return np.maximum(
            sent * load.bytes_out + received * load.bytes_back,
            received * load.bytes_out + sent * load.bytes_back,
        )

    if network is None:
        return largest_bytes(load.travelling) / link_gb_per_s / 1e3
    node = np.arange(len(load.travelling)) // network.ranks_per_node
    is_near = node[:, None] == node[None, :]
    near = largest_bytes(np.where(is_near, load.travelling, 0)) / link_gb_per_s
    far = largest_bytes(np.where(is_near, 0, load.travelling)) / network.gb_per_s
    return np.maximum(near, far) / 1e3


def predict_layer(
    plan: Plan,
    shape: AttentionShape,
    config: SplitKVConfig,
    calibration: Calibration,
    rank_speeds: Sequence[float] = (),
    network: Network | None = None,
) -> Prediction:
    """Predicts one attention layer of a plan; see `predict_load`.

    Raises:
        ValueError: the calibration is of another head dim or dtype.
    """
    check_measured(calibration, shape)
    return predict_load(layer_load(plan, shape, config), calibration, rank_speeds, network)


def make_plan_by_time(
    doc_lens: Sequence[int],
    cp_size: int,
    *,
    shape: AttentionShape,
    config: SplitKVConfig,
    calibration: Calibration,
    queries: Queries | None = None,
    machine: Machine | None = None,
    network: Network | None = None,
) -> tuple[Plan, float, dict[float, Prediction]]:
    """The plan with the least predicted layer time over `AUTO_TOLERANCES`: `tolerance="auto"`.

    A looser tolerance keeps more documents whole, so it sends less and computes longer.

    Args:
        machine: speeds and nodes; by default what rows and runs cost in the calibration.
        network: as in `predict_layer`.
    Returns:
        The plan, its tolerance, and the prediction of each tolerance.
    Raises:
        ValueError: as `make_plan` and `predict_layer`.
    """
    found: dict[float, Prediction] = {}
    chosen = machine or calibration.machine
    best: tuple[Plan, float] | None = None
    for tolerance in AUTO_TOLERANCES:
        plan = make_plan(
            doc_lens,
            cp_size,
            queries=queries,
            block_size=config.block_size,
            route=config.route,
            tolerance=tolerance,
            machine=chosen,
        )
        found[tolerance] = predict_layer(
            plan, shape, config, calibration, chosen.rank_speeds, network
        )
        if best is None or found[tolerance].layer_us < found[best[1]].layer_us:
            best = (plan, tolerance)
    assert best is not None
    return *best, found
