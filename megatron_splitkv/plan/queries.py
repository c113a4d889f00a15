"""Query specs: which query rows there are, and which keys each of them sees.

A spec is either of *self-attention* (every token is a query row and a KV row) or of *context
attention* (the query rows are a stream of their own that attends to the documents' keys).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import SupportsIndex

import megatron_splitkv._planner as _planner

INT64_MAX = (1 << 63) - 1


def whole_number(name: str, value: SupportsIndex) -> int:
    """`value` as an integer that the planner can count with.

    Raises:
        ValueError: it is no integer, or leaves 64 bits.
    """
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{name}={value} must be an integer") from None
    if abs(number) > INT64_MAX:
        raise ValueError(f"{name}={number} must fit into 64 bits")
    return number


def whole_numbers(name: str, values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """`whole_number` of each value."""
    values = tuple(values)
    try:
        numbers = tuple(map(index, values))
        array("q", numbers)  # all of them fit
    except (TypeError, OverflowError):
        return tuple(whole_number(name, value) for value in values)  # names the bad one
    return numbers


@dataclass(frozen=True, slots=True)
class Causal:
    """Self-attention: position p sees `[0, p + 1)` of its document."""


@dataclass(frozen=True, slots=True)
class Window:
    """Self-attention: position p sees `[p - size + 1, p + 1)`, the last `size` keys.

    Attributes:
        size: keys a row sees, itself included. Megatron's `window_size=(w, 0)` is `size=w + 1`.
    """

    size: int

    def __post_init__(self) -> None:
        if whole_number("window size", self.size) < 1:
            raise ValueError(f"window size={self.size} must be at least 1 key (the row itself)")


@dataclass(frozen=True, slots=True)
class Full:
    """Self-attention: every position sees its whole document."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Self-attention: position p sees `[0, max(p + 1, prefix))`: the prefix in full, then causally.

    Attributes:
        lengths: tokens of the prefix of each document; 0 is plain causal.
    """

    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Suffix:
    """Context attention: the last `num_rows` positions of each document, each causally.

    Chunked long-context training: a chunk of queries against all keys before it. A document
    shorter than `num_rows` has one row a token.
    """

    num_rows: int

    def __post_init__(self) -> None:
        if whole_number("suffix num_rows", self.num_rows) < 1:
            raise ValueError(f"suffix num_rows={self.num_rows} must be at least 1")


@dataclass(frozen=True, slots=True)
class Anchors:
    """Context attention: blocks of rows, each block sees its document up to its anchor.

    Block-diffusion drafter training. The block's own keys are not part of the context: they are
    computed where the block's query rows are, as one more partial.

    Attributes:
        positions: for each document its anchors, ascending; a row sees keys `[0, anchor)`, so an
            anchor at 0 sees no context.
        rows_per_anchor: query rows of one anchor's block.
    """

    positions: tuple[tuple[int, ...], ...]
    rows_per_anchor: int

    def __post_init__(self) -> None:
        if whole_number("rows_per_anchor", self.rows_per_anchor) < 1:
            raise ValueError(f"rows_per_anchor={self.rows_per_anchor} must be at least 1")


SelfQueries = Causal | Window | Full | Prefix
ContextQueries = Suffix | Anchors
Queries = SelfQueries | ContextQueries


def is_self_attention(queries: Queries) -> bool:
    """Whether query rows and KV rows are the same tokens."""
    return isinstance(queries, Causal | Window | Full | Prefix)


def rows_per_unit(queries: Queries) -> int:
    """Query rows that must stay on one rank together: an anchor's block, else a single row."""
    return queries.rows_per_anchor if isinstance(queries, Anchors) else 1


def build_model(
    queries: Queries, doc_lens: Sequence[int], padded_lens: Sequence[int]
) -> _planner.QueryModel:
    """Binds a spec to documents: the native object that knows every closed form.

    Raises:
        ValueError: negative lengths, a padded length below the length, anchors that do not
            ascend inside their document, prefixes longer than theirs, or 2**61 rows times keys.
    """
    name = type(queries).__name__.lower()
    pads = None if padded_lens is doc_lens else padded_lens  # converted once where equal
    match queries:
        case Window(size=size):
            return _planner.QueryModel(doc_lens, pads, name, size)
        case Suffix(num_rows=size):
            return _planner.QueryModel(doc_lens, pads, name, size)
        case Prefix(lengths=lengths):
            prefixes = whole_numbers("prefix length", lengths)
            return _planner.QueryModel(doc_lens, pads, name, anchor_positions=prefixes)
        case Anchors(positions=positions, rows_per_anchor=size):
            pointers = [0]
            for anchors in positions:
                pointers.append(pointers[-1] + len(anchors))
            flat = whole_numbers("anchor position", chain.from_iterable(positions))
            return _planner.QueryModel(doc_lens, pads, name, size, pointers, flat)
        case _:
            return _planner.QueryModel(doc_lens, pads, name)
