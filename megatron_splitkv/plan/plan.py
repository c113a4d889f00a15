"""`make_plan`: documents in, the placement of every KV token and query row out."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan.mirror import Int64Array, mirrored_runs
from megatron_splitkv.plan.queries import (
    Anchors,
    Causal,
    Full,
    Prefix,
    Queries,
    Suffix,
    Window,
    build_model,
    is_self_attention,
    rows_per_unit,
    whole_number,
    whole_numbers,
)
from megatron_splitkv.plan.route import check_route

BLOCKS_PER_RANK = 16  # cuts of one document fall on multiples of a block and still balance it
MAX_AUTO_BLOCK = 512  # longer blocks gain no kernel speed
SPEED_UNITS = 1 << 20  # of the fastest rank: speeds are compared in integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What else than visible pairs decides how long a rank takes; the same on every rank.

    Attributes:
        row_pairs: what a query row that a rank attends with costs beside its pairs, in pairs.
        run_pairs: likewise for a run: consecutive keys of one document on one rank.
        rank_speeds: relative speed of each rank, by which it gets more or less of the cost; empty
            where all are alike. Tokens stay equal, so speeds are met as far as keys differ in cost:
            not at all in one full-attention document.
        ranks_per_node: consecutive ranks of one node; documents keep to few nodes, and inside a
            node to few ranks. None takes all ranks for equally near.
    """

    row_pairs: int = 0
    run_pairs: int = 0
    rank_speeds: tuple[float, ...] = ()
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if whole_number("row_pairs", self.row_pairs) < 0:
            raise ValueError(f"row_pairs={self.row_pairs} must be at least 0")
        if whole_number("run_pairs", self.run_pairs) < 0:
            raise ValueError(f"run_pairs={self.run_pairs} must be at least 0")
        if self.ranks_per_node is not None and whole_number("ranks", self.ranks_per_node) < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be at least 1")
        if not all(0.0 < speed < math.inf for speed in self.rank_speeds):
            raise ValueError(f"rank_speeds={self.rank_speeds} must be positive and finite")


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: cached_property needs a __dict__
class Plan:
    """Where each KV token and each query row of a pack of documents lives.

    A plan is a pure function of its inputs: every rank and every pipeline stage computes the same
    one without talking. Plans compare by fingerprint.

    Attributes:
        cp_size: ranks of the context-parallel group.
        block_size: KV tokens of one planner block.
        doc_lens: true document lengths in stream order, tokens.
        padded_lens: document lengths with their pads; equal to `doc_lens` without padding.
        queries: the query spec that the costs were counted for.
        runs: `[num_runs, 4]` int64, read-only: rank, document, begin, end (positions in the
            document, half open), ordered by rank, document, begin.
        query_rows: query rows of each rank. In self-attention the rows are the rank's own tokens;
            in context attention rank r owns the next `query_rows[r]` rows of the query stream.
        costs: visible query-key pairs of each rank: those of its keys, or of its query rows where
            keys travel.
        route: what travels to what stays: "queries" to the keys, or "keys" to the query rows.
    """

    cp_size: int
    block_size: int
    doc_lens: tuple[int, ...]
    padded_lens: tuple[int, ...]
    queries: Queries
    runs: Int64Array
    query_rows: tuple[int, ...]
    costs: tuple[int, ...]
    route: str = "queries"

    @property
    def num_tokens(self) -> int:
        """KV tokens of the pack, pads included."""
        return sum(self.padded_lens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each rank, pads included."""
        counts = np.zeros(self.cp_size, dtype=np.int64)
        np.add.at(counts, self.runs[:, 0], self.runs[:, 3] - self.runs[:, 2])
        return tuple(counts.tolist())

    @property
    def nbytes(self) -> int:
        """About what the plan holds, in bytes: its runs, and 8 for each other number."""
        numbers = 2 * len(self.doc_lens) + 2 * self.cp_size
        if isinstance(self.queries, Anchors):
            numbers += sum(map(len, self.queries.positions))
        elif isinstance(self.queries, Prefix):
            numbers += len(self.queries.lengths)
        return self.runs.nbytes + 8 * numbers

    @property
    def is_self_attention(self) -> bool:
        """Whether query rows and KV rows are the same tokens."""
        return is_self_attention(self.queries)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly where the placement and the mask are equal."""
        header = json.dumps(
            [self.cp_size, self.route, _describe(self.queries), self.query_rows], default=int
        )
        digest = hashlib.blake2b(header.encode(), digest_size=8)
        for values in (self.doc_lens, self.padded_lens):
            digest.update(np.asarray(values, dtype="<i8").tobytes())
            digest.update(b"|")
        digest.update(self.runs.astype("<i8").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pickles forget that an array is read-only."""
        self.__dict__.update(state)
        _read_only(self.runs)

    def model(self, queries: Queries | None = None) -> _planner.QueryModel:
        """The closed forms of `queries` (default: the plan's own spec) over these documents."""
        return build_model(queries or self.queries, self.doc_lens, self.padded_lens)

    @property
    def mirrored_runs(self) -> Int64Array:
        """The runs where each document is read backwards, so that its rows are keys."""
        return mirrored_runs(self.runs, np.asarray(self.doc_lens, dtype=np.int64))

    def repeated(self, times: int) -> "Plan":
        """The plan of `times` copies of this pack laid end to end, their KV tokens placed alike.

        The query rows of context attention are split anew along the longer stream.
        """
        queries = self.queries
        if isinstance(queries, Anchors):
            queries = Anchors(queries.positions * times, queries.rows_per_anchor)
        elif isinstance(queries, Prefix):
            queries = Prefix(queries.lengths * times)
        doc_step = np.asarray([0, len(self.doc_lens), 0, 0], dtype=np.int64)
        copies = np.concatenate([self.runs + copy * doc_step for copy in range(times)])
        return Plan(
            cp_size=self.cp_size,
            block_size=self.block_size,
            doc_lens=self.doc_lens * times,
            padded_lens=self.padded_lens * times,
            queries=queries,
            runs=_read_only(copies[np.lexsort(copies.T[2::-1])]),
            query_rows=tuple(rows * times for rows in self.query_rows),
            route=self.route,
            costs=tuple(cost * times for cost in self.costs),
        )

    def to_json(self) -> str:
        """One JSON object that `plan_from_json` reads back."""
        return json.dumps(
            {
                "cp_size": self.cp_size,
                "block_size": self.block_size,
                "doc_lens": self.doc_lens,
                "padded_lens": self.padded_lens,
                "queries": _describe(self.queries),
                "runs": self.runs.tolist(),
                "query_rows": self.query_rows,
                "route": self.route,
                "costs": self.costs,
                "fingerprint": self.fingerprint,
            },
            default=int,  # specs may hold numpy integers
        )


def make_plan(  # noqa: PLR0913 (what has a default is seldom given)
    doc_lens: Sequence[int],
    cp_size: int,
    *,
    queries: Queries | None = None,
    block_size: int | None = None,
    padded_lens: Sequence[int] | None = None,
    query_rows: Sequence[int] | None = None,
    route: str = "queries",
    tolerance: float = 0.001,
    machine: Machine | None = None,
) -> Plan:
    """Places KV tokens on ranks: equal token counts, balanced cost, few ranks for each document.

    Documents that fit a rank stay whole on it. Longer ones are cut over as few ranks as can take
    them; a rank gets one or two runs of such a document, from its dear front and its cheap back.

    Args:
        doc_lens: document lengths in stream order, tokens; zero is allowed.
        cp_size: ranks to place the tokens on. Each gets `T // cp_size` tokens, the first
            `T % cp_size` ranks one more.
        queries: query spec, by default `Causal()`.
        block_size: KV tokens of a block: a document is cut at multiples of it where the balance
            allows. None takes the largest power of two up to 512 that leaves each rank at least 16
            blocks.
        padded_lens: document lengths with pads, by default `doc_lens`. Pads sit at a document's
            tail, see nothing and are seen by nobody, and are placed like any token.
        query_rows: context attention only: query rows that each rank owns, in stream order. By
            default an even split. A block of an anchor stays on one rank.
        route: what is to travel, "queries" or "keys", and so whose pairs are balanced.
        tolerance: accepted cost imbalance, max/mean - 1; more of it keeps more documents whole.
        machine: what else decides how long a rank takes.
    Raises:
        ValueError: lengths that are negative or no integers, cp_size or block_size below 1, a
            tolerance that is negative or NaN, anchors out of order, query_rows that do not cover
            the query stream, a route that the mask has not (see `check_route`), a machine of other
            ranks, or more than 2**61 rows times keys.
    Source: longest-processing-time-first, Graham 1969, for whole documents; keyed on the KV side
        because keys stay.
    """
    if whole_number("cp_size", cp_size) < 1:
        raise ValueError(f"cp_size={cp_size} must be at least 1")
    if not tolerance >= 0.0:  # also where it is NaN
        raise ValueError(f"tolerance={tolerance} must be at least 0; 0.001 accepts 0.1 %")
    lens = whole_numbers("doc_lens: length", doc_lens)
    padded = lens if padded_lens is None else whole_numbers("padded_lens: length", padded_lens)
    spec = queries or Causal()
    check_route(route, spec)
    model = build_model(spec, lens, padded)
    size = (
        _auto_block_size(model.num_tokens, cp_size)
        if block_size is None
        else whole_number("block_size", block_size)
    )
    runs, costs, tokens = _planner.assign_blocks(
        model,
        cp_size,
        size,
        round(min(tolerance, 1.0) * _planner.TOLERANCE_UNITS),
        **_machine_arguments(machine, cp_size),
    )
    if route == "keys":
        runs = mirrored_runs(runs, np.asarray(lens, dtype=np.int64))
    return Plan(
        cp_size=cp_size,
        block_size=size,
        doc_lens=lens,
        padded_lens=padded,
        queries=spec,
        runs=_read_only(runs),
        query_rows=(
            _own_tokens(tokens, query_rows)
            if is_self_attention(spec)
            else _split_query_rows(spec, model.num_rows, cp_size, query_rows)
        ),
        route=route,
        costs=tuple(costs),
    )


def plan_from_json(text: str) -> Plan:
    """Reads what `Plan.to_json` wrote.

    Raises:
        ValueError: the fingerprint or the costs do not match the contents.
    """
    data = json.loads(text)
    plan = Plan(
        cp_size=data["cp_size"],
        block_size=data["block_size"],
        doc_lens=tuple(data["doc_lens"]),
        padded_lens=tuple(data["padded_lens"]),
        queries=_parse(data["queries"]),
        runs=_read_only(np.asarray(data["runs"], dtype=np.int64).reshape(-1, 4)),
        query_rows=tuple(data["query_rows"]),
        route=data.get("route", "queries"),  # else it is older: refused by its fingerprint
        costs=tuple(data["costs"]),
    )
    if plan.fingerprint != data["fingerprint"] or plan.costs != count_costs(plan):
        raise ValueError(
            f"plan fingerprint={data['fingerprint']} with costs={data['costs']} does not match its "
            f"contents ({plan.fingerprint}); the file was edited or cut short, make the plan again"
        )
    return plan


def count_costs(plan: Plan) -> tuple[int, ...]:
    """The costs of a plan, counted from its runs and its route."""
    runs = plan.mirrored_runs if plan.route == "keys" else plan.runs
    return tuple(_planner.rank_costs(plan.model(), runs, plan.cp_size))


def _auto_block_size(num_tokens: int, cp_size: int) -> int:
    longest = max(1, num_tokens // (cp_size * BLOCKS_PER_RANK))
    return min(MAX_AUTO_BLOCK, 1 << (longest.bit_length() - 1))


def _machine_arguments(machine: Machine | None, cp_size: int) -> dict[str, Any]:
    if machine is None:
        return {}
    speeds = machine.rank_speeds
    if speeds and len(speeds) != cp_size:
        raise ValueError(f"rank_speeds are given for {len(speeds)} ranks, but cp_size={cp_size}")
    fastest = max(speeds, default=1.0)
    return {
        "ranks_per_node": machine.ranks_per_node or cp_size,
        "row_cost": machine.row_pairs,
        "run_cost": machine.run_pairs,
        "speed": [max(1, round(speed / fastest * SPEED_UNITS)) for speed in speeds],
    }


def _own_tokens(tokens: Sequence[int], query_rows: Sequence[int] | None) -> tuple[int, ...]:
    if query_rows is not None:
        raise ValueError(
            f"query_rows={list(query_rows)} is for context attention; in self-attention the "
            "query rows of a rank are its own tokens, leave it out"
        )
    return tuple(tokens)


def _split_query_rows(
    queries: Queries, num_rows: int, cp_size: int, query_rows: Sequence[int] | None
) -> tuple[int, ...]:
    unit = rows_per_unit(queries)
    if query_rows is None:
        ends = [num_rows // unit * (rank + 1) // cp_size * unit for rank in range(cp_size)]
        return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    rows = whole_numbers("query_rows: count", query_rows)
    if len(rows) != cp_size or sum(rows) != num_rows or min(rows) < 0:
        raise ValueError(
            f"query_rows={list(rows)} must be {cp_size} counts (one for each rank) that sum "
            f"to the {num_rows} rows of the query stream"
        )
    if any(count % unit for count in rows):
        raise ValueError(
            f"query_rows={list(rows)} must be multiples of rows_per_anchor={unit}, because the "
            "keys of an anchor's block live where its query rows are"
        )
    return rows


def _read_only(array: Int64Array) -> Int64Array:
    array.flags.writeable = False
    return array


def _describe(queries: Queries) -> dict[str, object]:
    fields = {name: getattr(queries, name) for name in queries.__dataclass_fields__}
    return {"kind": type(queries).__name__.lower(), **fields}


def _parse(data: dict[str, Any]) -> Queries:
    match data["kind"]:
        case "causal":
            return Causal()
        case "full":
            return Full()
        case "window":
            return Window(data["size"])
        case "prefix":
            return Prefix(tuple(data["lengths"]))
        case "suffix":
            return Suffix(data["num_rows"])
        case "anchors":
            positions = tuple(tuple(anchors) for anchors in data["positions"])
            return Anchors(positions, data["rows_per_anchor"])
        case kind:
            raise ValueError(f"queries={kind!r} is no query spec that this version knows")
