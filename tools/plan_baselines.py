"""Other ways to place a pack on ranks, to compare a plan with. Written from their descriptions.

Each baseline returns the rank of every block of a pack; blocks are `[n, 3]`: document, begin, end.
Queries live where their keys do. All are judged by what split-KV pays: visible pairs by key, or by
query row where keys travel.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan import (
    Plan,
    Queries,
    is_self_attention,
    travelling_rows,
)
from megatron_splitkv.plan.mirror import joined
from megatron_splitkv.plan.plan import count_costs
from megatron_splitkv.plan.queries import build_model, rows_per_unit
from megatron_splitkv.plan.report import max_over_mean

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A pack to place.

    Attributes:
        lens: document lengths, tokens.
        cp_size: ranks.
        queries: the query spec.
        block_size: tokens of a block.
        route: what travels, and so whose pairs count.
    """

    lens: tuple[int, ...]
    cp_size: int
    queries: Queries
    block_size: int
    route: str = "queries"

    @property
    def model(self) -> _planner.QueryModel:
        """Closed forms of the spec over these documents."""
        return build_model(self.queries, self.lens, self.lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Figures of a placement.

    Attributes:
        imbalance: max/mean - 1 of the visible pairs by rank.
        token_drift: likewise of the tokens.
        rows: query rows, or keys, that travel in one layer, over the rows that there are.
        num_runs: runs of consecutive keys over all ranks.
    """

    imbalance: float
    token_drift: float
    rows: float
    num_runs: int


def judge(plan: Plan) -> Judged:
    """Figures of a plan, made by us or by a baseline."""
    rows = travelling_rows(plan).sum() / max(1, plan.model().num_rows)
    return Judged(
        imbalance=max_over_mean(plan.costs) - 1.0,
        token_drift=max_over_mean(plan.tokens) - 1.0,
        rows=float(rows),
        num_runs=len(plan.runs),
    )


def plan_of_blocks(problem: Problem, blocks: Int64Array, ranks: Int64Array) -> Plan:
    """A plan that has each block on the rank that a baseline chose, adjacent blocks joined."""
    runs = joined(np.column_stack([ranks, blocks]))
    tokens = np.zeros(problem.cp_size, dtype=np.int64)
    np.add.at(tokens, runs[:, 0], runs[:, 3] - runs[:, 2])
    model = problem.model
    unit = rows_per_unit(problem.queries)
    ends = [
        model.num_rows // unit * (rank + 1) // problem.cp_size * unit
        for rank in range(problem.cp_size)
    ]
    is_self = is_self_attention(problem.queries)
    plan = Plan(
        cp_size=problem.cp_size,
        block_size=problem.block_size,
        doc_lens=problem.lens,
        padded_lens=problem.lens,
        queries=problem.queries,
        runs=runs,
        query_rows=tuple(tokens.tolist()) if is_self else tuple(np.diff([0, *ends]).tolist()),
        route=problem.route,
        costs=(),
    )
    return replace(plan, costs=count_costs(plan))


def cut_at(lens: Sequence[int], ends: Sequence[int]) -> Int64Array:
    """Blocks between cuts of the pack at `ends` (ascending, the last is its end) and documents."""
    starts = np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])
    cuts = np.unique(np.concatenate([starts, np.asarray(ends, dtype=np.int64)]))
    document = np.searchsorted(starts, cuts[:-1], side="right") - 1
    begin = starts[document]
    return np.column_stack([document, cuts[:-1] - begin, cuts[1:] - begin])


def equal_blocks(problem: Problem) -> Int64Array:
    """Every document in blocks of the block size; its last one may be shorter."""
    lens = np.asarray(problem.lens, dtype=np.int64)
    counts = -(-lens // problem.block_size)
    document = np.repeat(np.arange(len(lens)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    begin = (np.arange(len(document)) - first) * problem.block_size
    return np.column_stack(
        [document, begin, np.minimum(begin + problem.block_size, lens[document])]
    )


def key_costs(problem: Problem, blocks: Int64Array) -> Int64Array:
    """Visible pairs by key of each block, `[n]`."""
    model = problem.model
    return np.asarray([model.pairs_in(*block) for block in blocks.tolist()], dtype=np.int64)


def query_costs(problem: Problem, blocks: Int64Array) -> Int64Array:
    """Visible pairs by query row of each block, `[n]`; self-attention only."""
    intervals = problem.model.row_intervals()
    before = np.concatenate([[0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    start = np.concatenate([[0], np.cumsum(problem.lens, dtype=np.int64)])[blocks[:, 0]]
    return before[start + blocks[:, 2]] - before[start + blocks[:, 1]]


def paid_costs(problem: Problem, blocks: Int64Array) -> Int64Array:
    """Those that the route pays, `[n]`."""
    return (query_costs if problem.route == "keys" else key_costs)(problem, blocks)


def _fractions(num_tokens: int, parts: int) -> list[int]:
    return [num_tokens * (part + 1) // parts for part in range(parts)]


def _rank_of_position(problem: Problem, blocks: Int64Array, ends: Sequence[int]) -> Int64Array:
    """Index of the part of the pack, cut at `ends`, that a block lies in."""
    start = np.concatenate([[0], np.cumsum(problem.lens, dtype=np.int64)])[blocks[:, 0]]
    return np.searchsorted(np.asarray(ends), start + blocks[:, 1], side="right")


def contiguous(problem: Problem) -> Plan:
    """The pack in `cp_size` equal parts."""
    ends = _fractions(sum(problem.lens), problem.cp_size)
    blocks = cut_at(problem.lens, ends)
    return plan_of_blocks(problem, blocks, _rank_of_position(problem, blocks, ends))


def zig_zag(problem: Problem) -> Plan:
    """The pack in `2 cp` parts; rank i has parts i and 2 cp - 1 - i."""
    ends = _fractions(sum(problem.lens), 2 * problem.cp_size)
    blocks = cut_at(problem.lens, ends)
    part = _rank_of_position(problem, blocks, ends)
    return plan_of_blocks(problem, blocks, np.minimum(part, 2 * problem.cp_size - 1 - part))


def _zig_zag_document(length: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """`(rank, begin, end)` of the `2 num_ranks` parts of one document."""
    ends = [0, *_fractions(length, 2 * num_ranks)]
    return [
        (min(part, 2 * num_ranks - 1 - part), ends[part], ends[part + 1])
        for part in range(2 * num_ranks)
        if ends[part] < ends[part + 1]
    ]


def document_zig_zag(problem: Problem) -> Plan:
    """Zig-zag inside each document, as in Transformer Engine's THD format (without its pads)."""
    rows = [
        (rank, document, begin, end)
        for document, length in enumerate(problem.lens)
        for rank, begin, end in _zig_zag_document(length, problem.cp_size)
    ]
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
    return plan_of_blocks(problem, table[:, 1:], table[:, 0])


def power_of_two_groups(problem: Problem) -> Plan:
    """Each document on a group of the next power of two of ranks that can hold it, longest first,
    the least loaded group, zig-zag inside: degrees as dynamic context parallelism gives them."""
    capacity = -(-sum(problem.lens) // problem.cp_size)
    loads = np.zeros(problem.cp_size)
    rows: list[tuple[int, int, int, int]] = []
    for document in sorted(range(len(problem.lens)), key=lambda i: (-problem.lens[i], i)):
        length = problem.lens[document]
        degree = 1
        while degree * capacity < length and degree * 2 <= problem.cp_size:
            degree *= 2
        groups = problem.cp_size // degree
        group = int(np.argmin(loads[: groups * degree].reshape(groups, degree).max(axis=1)))
        loads[group * degree : (group + 1) * degree] += length * length / degree
        for rank, begin, end in _zig_zag_document(length, degree):
            rows.append((group * degree + rank, document, begin, end))
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
    return plan_of_blocks(problem, table[:, 1:], table[:, 0])


def _least_loaded(costs: Int64Array, cp_size: int, most_blocks: int | None) -> Int64Array:
    """Longest processing time first; a rank leaves when it has `most_blocks`."""
    heap = [(0, rank, 0) for rank in range(cp_size)]
    ranks = np.empty(len(costs), dtype=np.int64)
    for block in np.lexsort((np.arange(len(costs)), -costs)).tolist():
        load, rank, count = heapq.heappop(heap)
        ranks[block] = rank
        if most_blocks is None or count + 1 < most_blocks:
            heapq.heappush(heap, (load + int(costs[block]), rank, count + 1))
    return ranks


def query_lpt(problem: Problem) -> Plan:
    """LPT of blocks by the pairs of their query rows: what most balancers weigh."""
    blocks = equal_blocks(problem)
    ranks = _least_loaded(query_costs(problem, blocks), problem.cp_size, None)
    return plan_of_blocks(problem, blocks, ranks)


def key_lpt(problem: Problem) -> Plan:
    """LPT of blocks by the pairs of their keys, without a bound on tokens."""
    blocks = equal_blocks(problem)
    ranks = _least_loaded(key_costs(problem, blocks), problem.cp_size, None)
    return plan_of_blocks(problem, blocks, ranks)


def equal_counts(problem: Problem) -> Plan:
    """The same with equally many blocks a rank: a min-heap as in MagiAttention's dispatcher."""
    blocks = equal_blocks(problem)
    most = -(-len(blocks) // problem.cp_size)
    ranks = _least_loaded(paid_costs(problem, blocks), problem.cp_size, most)
    return plan_of_blocks(problem, blocks, ranks)


def sort_and_deal(problem: Problem) -> Plan:
    """Blocks sorted by work and dealt back and forth, as PyTorch's PTRR load balancer does."""
    blocks = equal_blocks(problem)
    order = np.lexsort((np.arange(len(blocks)), -paid_costs(problem, blocks)))
    turn = np.arange(len(blocks)) % (2 * problem.cp_size)
    ranks = np.empty(len(blocks), dtype=np.int64)
    ranks[order] = np.minimum(turn, 2 * problem.cp_size - 1 - turn)
    return plan_of_blocks(problem, blocks, ranks)


BASELINES: dict[str, Callable[[Problem], Plan]] = {
    "contiguous": contiguous,
    "zig-zag": zig_zag,
    "per-document zig-zag": document_zig_zag,
    "power-of-two groups": power_of_two_groups,
    "query-side LPT": query_lpt,
    "sort and deal": sort_and_deal,
    "equal block counts": equal_counts,
    "key-side LPT": key_lpt,
}
SELF_ATTENTION_ONLY = frozenset({"query-side LPT"})


def baselines_of(problem: Problem) -> dict[str, Callable[[Problem], Plan]]:
    """The baselines that the spec allows."""
    if is_self_attention(problem.queries):
        return BASELINES
    return {name: make for name, make in BASELINES.items() if name not in SELF_ATTENTION_ONLY}
