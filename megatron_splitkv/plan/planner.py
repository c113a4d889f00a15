"""`Planner`: the plans of a run, made in training or ahead of it in a data loader's worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan.plan import Machine, Plan, make_plan
from megatron_splitkv.plan.predict import Calibration, check_measured, make_plan_by_time
from megatron_splitkv.plan.queries import Causal, Queries
from megatron_splitkv.plan.report import AttentionShape
from megatron_splitkv.plan.route import check_route


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the time of a layer is predicted from.

    Attributes:
        calibration: measured kernel times.
        shape: of the model's attention on one tensor-parallel rank.
    Raises:
        ValueError: the calibration is of another head dim or dtype.
    """

    calibration: Calibration
    shape: AttentionShape

    def __post_init__(self) -> None:
        check_measured(self.calibration, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans packs with the settings of a run. Small to pickle, and imports no torch.

    Attributes:
        cp_size: ranks of the context-parallel group.
        config: settings of the run.
        queries: the mask that placement balances; it must have the route of the config.
        timing: where it is given, each pack takes the tolerance with the least predicted time, and
            what rows and runs cost is balanced too.
    Raises:
        ValueError: the mask has not the route of the config.
    """

    cp_size: int
    config: SplitKVConfig = field(default_factory=SplitKVConfig)
    queries: Queries = field(default_factory=Causal)
    timing: Timing | None = None

    def __post_init__(self) -> None:
        check_route(self.config.route, self.queries)

    def __call__(self, doc_lens: Sequence[int]) -> Plan:
        """The plan of a pack of documents without pads.

        Raises:
            ValueError: as `make_plan`.
        """
        config, timing = self.config, self.timing
        costs = Machine() if timing is None else timing.calibration.machine
        machine = replace(
            costs, rank_speeds=config.rank_speeds, ranks_per_node=config.ranks_per_node
        )
        if timing is None:
            return make_plan(
                doc_lens,
                self.cp_size,
                queries=self.queries,
                block_size=config.block_size,
                route=config.route,
                tolerance=config.balance_tolerance,
                machine=machine,
            )
        plan, _, _ = make_plan_by_time(
            doc_lens,
            self.cp_size,
            shape=timing.shape,
            config=config,
            calibration=timing.calibration,
            queries=self.queries,
            machine=machine,
        )
        return plan
