"""Which query rows travel from which rank to which, counted from the plan alone."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan.plan import Int64Array, Plan
from megatron_splitkv.plan.queries import Queries, is_self_attention

# A single stage becomes one all_gather when this share of all rows would travel anyway.
ALL_GATHER_DENSITY = 0.95
# A stage that is not asked for brings at least about so many rows: each reads the local keys and
# adds to their gradients once more, and fills the GPU once more.
MIN_STAGE_ROWS = 8192
# What a stage brings unless it is told, in rows that a rank owns: buffers are of that size.
ROWS_OF_STAGE = 0.5
# Consecutive rows of a rank that go to the same stage: whole tiles of the kernels.
DEALT_ROWS = 512
# From this many local keys for each query row on, a rank waits for the rows of the others and does
# them together with its own: to read the keys and write their gradients once more takes longer.
JOINT_KEYS_PER_ROW = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRows:
    """Query rows that travel in one stage.

    Attributes:
        owned: for each rank `[n, 2]` int64 ranges of the query stream, its rows in this stage.
        needed: as in `RowExchange`.
        counts: `[cp_size, cp_size]` int64: rows that rank `s` sends to rank `r`.
        is_all_gather: every rank sends all its rows to every other one, equally many.
    """

    owned: tuple[Int64Array, ...]
    needed: tuple[Int64Array, ...]
    counts: Int64Array
    is_all_gather: bool

    def ranges(self, source: int, destination: int) -> Int64Array:
        """Ranges of the query stream that `source` sends to `destination`, `[n, 2]`."""
        if self.counts[source, destination] == 0:
            return self.owned[source][:0]
        if self.is_all_gather:
            return self.owned[source]
        return _planner.intersect(self.owned[source], self.needed[destination])


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

    def num_exchanges(self, num_stages: int | None) -> int:
        """Exchanges of one direction at most; 0 in a group of one.

        Args:
            num_stages: upper bound; None bounds the rows of a stage instead.
        """
        if len(self.owned) == 1 or self.is_joint:
            return int(self.is_joint)
        own_rows = self._most_own_rows()
        if num_stages is None:
            rows = max(MIN_STAGE_ROWS, ROWS_OF_STAGE * own_rows)
            num_stages = round(int(self.travelling().sum(axis=0).max()) / rows)
        return max(1, min(num_stages, own_rows))

    def stages(self, num_stages: int | None) -> tuple[StageRows, ...]:
        """The exchange in stages: blocks of each rank's rows, dealt to them in turn.

        All answers to a row come back in one stage, and each stage is as even over ranks as all.

        Args:
            num_stages: as in `num_exchanges`.
        """
        num = self.num_exchanges(num_stages)
        if num == 0:
            return ()
        if num == 1:
            counts = self.counts if self.is_joint else self.sent(num_stages)
            is_all_gather = self.is_all_gather(num_stages)
            return (
                StageRows(
                    owned=self.owned,
                    needed=self.needed,
                    counts=counts,
                    is_all_gather=is_all_gather,
                ),
            )
        block = min(DEALT_ROWS, -(-self._most_own_rows() // num))
        dealt = [_deal(ranges, block, num) for ranges in self.owned]
        return tuple(
            StageRows(
                owned=owned,
                needed=self.needed,
                counts=between_ranks(_planner.row_counts(owned, self.needed)),
                is_all_gather=False,
            )
            for owned in zip(*dealt, strict=True)
        )

    def is_all_gather(self, num_stages: int | None) -> bool:
        """Whether the exchange is one all_gather: one stage, and nearly all rows travel anyway."""
        cp_size = len(self.owned)
        own_rows = {_num_rows(ranges) for ranges in self.owned}
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
        return between_ranks(self.counts)

    def sent(self, num_stages: int | None) -> Int64Array:
        """The same as they are sent: all rows, where the exchange is one all_gather."""
        if self.is_all_gather(num_stages):
            return between_ranks(np.full_like(self.counts, _num_rows(self.owned[0])))
        return self.travelling()

    def _most_own_rows(self) -> int:
        return max(map(_num_rows, self.owned))


def between_ranks(counts: Int64Array) -> Int64Array:
    """The counts without those of a rank to itself."""
    others = counts.copy()
    np.fill_diagonal(others, 0)
    return others


def _num_rows(ranges: Int64Array) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _deal(ranges: Int64Array, block: int, num_hands: int) -> list[Int64Array]:
    """Cuts the rows of sorted ranges into blocks of `block` rows and deals these in turn."""
    lengths = ranges[:, 1] - ranges[:, 0]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Places in the list of all rows where a range or a block begins.
    edges = np.unique(np.concatenate([starts, ends, np.arange(0, lengths.sum(), block)]))
    begins, stops = edges[:-1], edges[1:]
    inside = np.searchsorted(ends, begins, side="right")
    to_row = (ranges[:, 0] - starts)[inside]
    pieces = np.stack([begins + to_row, stops + to_row], axis=1)
    hands = begins // block % num_hands
    return [pieces[hands == hand] for hand in range(num_hands)]


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
    owned = owned_rows(plan)
    needed = tuple(_planner.needed_rows(plan.model(spec), plan.runs, plan.cp_size))
    counts = _planner.row_counts(owned, needed)
    num_rows, num_keys = counts.sum(axis=0), np.asarray(plan.tokens)
    is_joint = plan.cp_size > 1 and bool(
        num_rows.any() and (JOINT_KEYS_PER_ROW * num_rows <= num_keys).all()
    )
    return RowExchange(owned=owned, needed=needed, counts=counts, is_joint=is_joint)


def owned_rows(plan: Plan) -> tuple[Int64Array, ...]:
    """For each rank `[n, 2]` ranges of the query stream, the rows that it owns."""
    if not plan.is_self_attention:
        starts = (0, *accumulate(plan.query_rows))
        return tuple(np.asarray([pair], dtype=np.int64) for pair in pairwise(starts))
    doc_starts = np.concatenate([[0], np.cumsum(plan.padded_lens, dtype=np.int64)])
    ranges = doc_starts[plan.runs[:, 1:2]] + plan.runs[:, 2:]
    first = np.searchsorted(plan.runs[:, 0], np.arange(plan.cp_size + 1))
    return tuple(ranges[begin:end] for begin, end in pairwise(first.tolist()))
