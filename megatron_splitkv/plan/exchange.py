"""Which query rows travel from which rank to which, counted from the plan alone."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

import numpy as np

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan.plan import Int64Array, Plan
from megatron_splitkv.plan.queries import Queries, is_self_attention

# A single stage becomes one all_gather when this share of all rows would travel anyway.
ALL_GATHER_DENSITY = 0.95
# Rows that two ranks exchange in one stage are not cut below this: each stage reads the local keys
# and adds to their gradients once more.
MIN_STAGE_ROWS = 4096
# What a stage brings unless it is told, in rows that a rank owns: buffers are of that size, and at
# most so much is not hidden of the way back.
ROWS_OF_STAGE = 0.5
# From this many local keys for each query row on, a rank waits for the rows of the others and does
# them together with its own: to read the keys and write their gradients once more takes longer.
JOINT_KEYS_PER_ROW = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExchange:
    """Query rows that each rank owns and needs.

    Attributes:
        owned: for each rank `[n, 2]` int64 ranges of the query stream, sorted and disjoint.
        needed: likewise, the rows that see at least one key of the rank.
        counts: `[cp_size, cp_size]` int64: rows that rank `s` owns and rank `r` needs.
        is_joint: rows are few beside the keys, so that each rank does all of them at once, its own
            among them, in one exchange.
    """

    owned: tuple[Int64Array, ...]
    needed: tuple[Int64Array, ...]
    counts: Int64Array
    is_joint: bool

    def ranges(self, source: int, destination: int) -> Int64Array:
        """Ranges of the query stream that `source` owns and `destination` needs, `[n, 2]`."""
        return _planner.intersect(self.owned[source], self.needed[destination])

    def cuts(self, num_stages: int | None) -> tuple[int, int]:
        """How the exchange is cut: groups of peers, and pieces of their rows.

        Ranks come first: with `cp_size - 1` groups the rows of one rank arrive at a time. What is
        left of the bound cuts these into pieces of `MIN_STAGE_ROWS` or more.

        Args:
            num_stages: upper bound on the product; None bounds the rows of a stage instead.
        """
        if self.is_joint:
            return 1, 1
        travelling = self.travelling()
        if num_stages is None:
            own_rows = max(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in self.owned)
            rows = max(MIN_STAGE_ROWS, ROWS_OF_STAGE * own_rows)
            num_stages = max(1, ceil(int(travelling.sum(axis=0).max()) / rows))
        groups = min(num_stages, max(1, len(self.owned) - 1))
        most = int(travelling.max()) // MIN_STAGE_ROWS
        return groups, max(1, min(num_stages // groups, most))

    def num_exchanges(self, num_stages: int | None) -> int:
        """Exchanges of one direction at most; 0 in a group of one."""
        groups, pieces = self.cuts(num_stages)
        return groups * pieces if len(self.owned) > 1 else 0

    def is_all_gather(self, num_stages: int | None) -> bool:
        """Whether the exchange is one all_gather: one stage, and nearly all rows travel anyway."""
        cp_size = len(self.owned)
        own_rows = {int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in self.owned}
        everything = (cp_size - 1) * cp_size * max(own_rows)
        is_even = len(own_rows) == 1
        return (
            not self.is_joint
            and self.num_exchanges(num_stages) == 1
            and is_even
            and int(self.travelling().sum()) >= ALL_GATHER_DENSITY * everything > 0
        )

    def travelling(self) -> Int64Array:
        """Rows of each rank that each other one needs, `[cp_size, cp_size]`, 0 on the diagonal."""
        counts = self.counts.copy()
        np.fill_diagonal(counts, 0)
        return counts

    def sent(self, num_stages: int | None) -> Int64Array:
        """The same as they are sent: all rows, where the exchange is one all_gather."""
        counts = self.counts.copy()
        if self.is_all_gather(num_stages):
            counts[:] = (self.owned[0][:, 1] - self.owned[0][:, 0]).sum()
        np.fill_diagonal(counts, 0)
        return counts


def plan_exchange(plan: Plan, queries: Queries | None = None) -> RowExchange:
    """Finds the rows to exchange for one attention call over the plan's placement.

    Args:
        plan: the placement.
        queries: the mask of this call where it differs from the plan's own spec, as in a model
            that mixes window and full layers. It must have the plan's query rows.
    Raises:
        ValueError: `queries` is of context attention and is not the plan's own spec.
    """
    spec = queries or plan.queries
    if spec != plan.queries and not (is_self_attention(spec) and plan.is_self_attention):
        raise ValueError(
            f"queries={spec} has other query rows than the plan ({plan.queries}); make a plan of "
            "its own for it"
        )
    owned = _owned_rows(plan)
    needed = tuple(_planner.needed_rows(plan.model(spec), plan.runs, plan.cp_size))
    counts = _planner.row_counts(owned, needed)
    num_rows, num_keys = counts.sum(axis=0), np.asarray(plan.tokens)
    is_joint = plan.cp_size > 1 and bool(
        num_rows.any() and (JOINT_KEYS_PER_ROW * num_rows <= num_keys).all()
    )
    return RowExchange(owned=owned, needed=needed, counts=counts, is_joint=is_joint)


def _owned_rows(plan: Plan) -> tuple[Int64Array, ...]:
    if not plan.is_self_attention:
        starts = (0, *accumulate(plan.query_rows))
        return tuple(np.asarray([pair], dtype=np.int64) for pair in pairwise(starts))
    doc_starts = np.concatenate([[0], np.cumsum(plan.padded_lens, dtype=np.int64)])
    ranges = doc_starts[plan.runs[:, 1:2]] + plan.runs[:, 2:]
    first = np.searchsorted(plan.runs[:, 0], np.arange(plan.cp_size + 1))
    return tuple(ranges[begin:end] for begin, end in pairwise(first.tolist()))
