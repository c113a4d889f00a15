"""One training run under Split-KV: its plans, its attention class, and its start-up line."""

from argparse import Namespace

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore.arguments import splitkv_config_from_args
from megatron_splitkv.mcore.model_arguments import placement_queries
from megatron_splitkv.mcore.module import SplitKVAttention
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.mcore.timing import timing_from_args
from megatron_splitkv.plan import Plan
from megatron_splitkv.plan.report import AttentionShape, count_traffic, report_plan


class Session:
    """What the hooks of a run share. Made before the arguments are known, configured by them."""

    def __init__(self) -> None:
        self._book: PlanBook | None = None
        self._attention: type[SplitKVAttention] | None = None
        self._num_hooks = 0
        self._announces = False
        self._num_attention_calls = 0

    def configure(self, args: Namespace, *, num_hooks: int) -> None:
        """Takes the settings of the run from its validated arguments.

        Args:
            args: Megatron's, with ours.
            num_hooks: replacements in force, for the start-up line.
        """
        self._book = PlanBook(
            splitkv_config_from_args(args), placement_queries(args), timing_from_args(args)
        )
        self._attention = SplitKVAttention.with_book(self._book, self._on_call)
        self._num_hooks = num_hooks
        self._announces = args.rank == 0

    @property
    def book(self) -> PlanBook:
        """The plans of this run."""
        assert self._book is not None, "hooks were called before the arguments were validated"
        return self._book

    @property
    def attention(self) -> type[SplitKVAttention]:
        """The core attention of this run's layers."""
        assert self._attention is not None, "a spec was built before the arguments were validated"
        return self._attention

    @property
    def num_attention_calls(self) -> int:
        """How often layers of this run called `SplitKVAttention.forward`."""
        return self._num_attention_calls

    def forget_plans(self) -> None:
        """Lets go of the process groups that plans refer to."""
        if self._book is not None:
            self._book.forget()

    def _on_call(self, plan: Plan, shape: AttentionShape, transport: str) -> None:
        """Counts, and prints the start-up line at the first attention call of the first rank."""
        self._num_attention_calls += 1
        if self._announces:
            self._announces = False
            line = startup_line(
                plan, shape, self.book.config, transport=transport, num_hooks=self._num_hooks
            )
            print(line, flush=True)


def startup_line(
    plan: Plan, shape: AttentionShape, config: SplitKVConfig, *, transport: str, num_hooks: int
) -> str:
    """Names what is active, with the figures of the first plan.

    Args:
        plan: of the first microbatch.
        shape: of one attention call, on one tensor-parallel rank.
        config: settings of the run.
        transport: what rows travel by, as it was chosen.
        num_hooks: replacements in force.
    Returns:
        One line; stages are exchanges of one direction, bytes those of one layer, summed over the
        context-parallel group.
    """
    report = report_plan(plan, shape, config)
    return (
        f"splitkv: impl=splitkv cp={plan.cp_size} block_size={plan.block_size} "
        f"route={plan.route} stages={count_traffic(plan, shape, config).num_exchanges} "
        f"partial_dtype={config.resolved_partial_dtype(shape.dtype)} transport={transport} "
        f"imbalance={report.cost_max_over_mean - 1:.1%} "
        f"hooks={num_hooks} bytes/layer fwd={_megabytes(report.bytes_forward)} "
        f"bwd={_megabytes(report.bytes_backward)} "
        "(first microbatch, summed over the context-parallel group)"
    )


def _megabytes(by_rank: tuple[int, ...]) -> str:
    return f"{sum(by_rank) / 1e6:.2f}MB"
