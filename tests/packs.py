"""Packs of documents for tests: dense masks, owners, and strategies that draw them.

The masks are written from the definitions of the query specs, document by document and element by
element; they share nothing with the closed forms of the planner that they judge. No torch.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Plan,
    Prefix,
    Queries,
    Suffix,
    Window,
    is_self_attention,
)


def _document_mask(queries: Queries, doc: int, length: int, padded: int) -> np.ndarray:
    """`[rows, padded]` bool of one document."""
    rows, keys = np.arange(length)[:, None], np.arange(length)[None, :]
    match queries:
        case Causal():
            seen = keys <= rows
        case Window(size=size):
            seen = (keys <= rows) & (keys > rows - size)
        case Full():
            seen = np.ones((length, length), dtype=bool)
        case Prefix(lengths=lengths):
            seen = (keys <= rows) | (keys < lengths[doc])
        case Suffix(num_rows=num_rows):
            seen = (keys <= rows)[max(0, length - num_rows) :]
        case Anchors(positions=positions, rows_per_anchor=size):
            anchors = np.repeat(np.asarray(positions[doc], dtype=np.int64), size)
            seen = keys < anchors[:, None]
    num_rows = padded if is_self_attention(queries) else len(seen)
    mask = np.zeros((num_rows, padded), dtype=bool)
    mask[: len(seen), :length] = seen
    return mask


def dense_mask(
    queries: Queries, doc_lens: Sequence[int], padded_lens: Sequence[int] | None = None
) -> np.ndarray:
    """Which query row of the stream sees which KV token, `[num_rows, num_tokens]` bool."""
    padded_lens = doc_lens if padded_lens is None else padded_lens
    masks = [
        _document_mask(queries, doc, length, padded)
        for doc, (length, padded) in enumerate(zip(doc_lens, padded_lens, strict=True))
    ]
    shape = (sum(len(mask) for mask in masks), sum(padded_lens))
    whole = np.zeros(shape, dtype=bool)
    row = column = 0
    for mask in masks:
        whole[row : row + mask.shape[0], column : column + mask.shape[1]] = mask
        row, column = row + mask.shape[0], column + mask.shape[1]
    return whole


def plan_mask(plan: Plan, queries: Queries | None = None) -> np.ndarray:
    """`dense_mask` of a plan."""
    return dense_mask(queries or plan.queries, plan.doc_lens, plan.padded_lens)


def block_mask(plan: Plan) -> np.ndarray:
    """Which query row sees which own-block key of an anchor plan, `[num_rows, num_rows]` bool."""
    assert isinstance(plan.queries, Anchors)
    block = np.arange(sum(plan.query_rows)) // plan.queries.rows_per_anchor
    return block[:, None] == block[None, :]


def members(ranges: np.ndarray, size: int) -> np.ndarray:
    """`[size]` bool of `[n, 2]` ranges; asserts that they are sorted, disjoint and not empty."""
    assert ranges.dtype == np.int64
    assert ranges.shape == (len(ranges), 2)
    is_member = np.zeros(size, dtype=bool)
    last = 0
    for begin, end in ranges.tolist():
        assert last <= begin < end <= size
        is_member[begin:end] = True
        last = end
    return is_member


def pad_rows(plan: Plan) -> np.ndarray:
    """Which query rows are pads, `[num_rows]` bool."""
    if not plan.is_self_attention:
        return np.zeros(sum(plan.query_rows), dtype=bool)
    lengths = zip(plan.doc_lens, plan.padded_lens, strict=True)
    pads = [np.arange(padded) >= length for length, padded in lengths]
    return np.concatenate(pads or [np.zeros(0, dtype=bool)])


def owner_of_tokens(plan: Plan) -> np.ndarray:
    """Rank of each KV token, `[num_tokens]`; asserts that each token lives exactly once."""
    starts = np.concatenate([[0], np.cumsum(plan.padded_lens)]).astype(np.int64)
    owner = np.full(plan.num_tokens, -1, dtype=np.int64)
    for rank, doc, begin, end in plan.runs.tolist():
        assert 0 <= begin < end <= plan.padded_lens[doc]
        there = owner[starts[doc] + begin : starts[doc] + end]
        assert (there == -1).all(), f"document {doc} [{begin}, {end}) is placed twice"
        there[:] = rank
    assert (owner >= 0).all(), "tokens without a rank"
    return owner


def owner_of_rows(plan: Plan) -> np.ndarray:
    """Rank of each query row of the stream, `[num_rows]`."""
    if plan.is_self_attention:
        return owner_of_tokens(plan)
    return np.repeat(np.arange(plan.cp_size), plan.query_rows)


# Strategies. Lengths 0 and 1 are as likely as long ones.


def document_lengths(max_docs: int = 6, max_length: int = 40) -> st.SearchStrategy[list[int]]:
    """Lengths of a pack, zero-length and length-1 documents included; the pack may be empty."""
    length = st.one_of(st.sampled_from([0, 1]), st.integers(0, max_length))
    return st.lists(length, max_size=max_docs)


@st.composite
def query_specs(draw: st.DrawFn, doc_lens: Sequence[int], kinds: str = "cwfpsa") -> Queries:
    """A spec for these documents; `kinds` holds first letters of the kinds to draw from."""
    kind = draw(st.sampled_from(kinds))
    longest = max([1, *doc_lens])
    if kind == "w":
        return Window(draw(st.integers(1, longest + 2)))
    if kind == "p":
        return Prefix(tuple(draw(st.integers(0, length)) for length in doc_lens))
    if kind == "s":
        return Suffix(draw(st.integers(1, longest + 2)))
    if kind == "a":
        anchors = [
            tuple(sorted(draw(st.lists(st.integers(0, length), max_size=4)))) for length in doc_lens
        ]
        return Anchors(tuple(anchors), draw(st.integers(1, 4)))
    return Causal() if kind == "c" else Full()


@st.composite
def packs(
    draw: st.DrawFn, kinds: str = "cwfpsa", *, max_length: int = 40
) -> tuple[list[int], list[int], Queries]:
    """Document lengths, padded lengths and a spec."""
    lens = draw(document_lengths(max_length=max_length))
    has_pads = draw(st.booleans())
    padded = [length + (draw(st.integers(0, 5)) if has_pads else 0) for length in lens]
    return lens, padded, draw(query_specs(lens, kinds))
