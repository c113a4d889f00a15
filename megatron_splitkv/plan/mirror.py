"""Read backwards, a document swaps its query rows and its keys.

Under the causal, window and full masks, row p of a document of L tokens sees key j exactly where
row L-1-j sees key L-1-p. So all that is known of the keys of a placement (their cost, the rows that
see them) holds of the rows of the mirrored one: reversed are the real tokens of each document, its
pads stay where they are.
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def mirrored_runs(runs: Int64Array, doc_lens: Int64Array) -> Int64Array:
    """Runs of a placement, `[n, 4]` as in `Plan`, of the reversed documents; its own inverse."""
    lens = doc_lens[runs[:, 1]]
    return joined(_reversed(runs[:, :2], runs[:, 2], runs[:, 3], lens))


def mirrored_ranges(ranges: Int64Array, doc_lens: Int64Array, doc_starts: Int64Array) -> Int64Array:
    """Sorted disjoint ranges of the token stream, `[n, 2]`, of the reversed documents.

    Args:
        ranges: none holds a pad of a document but between two real tokens.
        doc_lens: real tokens of each document.
        doc_starts: where each document begins in the stream, pads counted, `[num_docs + 1]`.
    """
    first = np.searchsorted(doc_starts, ranges[:, 0], side="right") - 1
    last = np.searchsorted(doc_starts, ranges[:, 1], side="left") - 1
    times = np.maximum(last - first + 1, 0)
    skipped = np.cumsum(times) - times
    doc = np.arange(int(times.sum()), dtype=np.int64) - np.repeat(skipped - first, times)
    begin = np.maximum(np.repeat(ranges[:, 0], times) - doc_starts[doc], 0)
    end = np.minimum(np.repeat(ranges[:, 1], times) - doc_starts[doc], doc_lens[doc])
    pieces = _reversed(np.stack([doc, doc], axis=1), begin, end, doc_lens[doc])
    pieces[:, 2:] += doc_starts[pieces[:, 1:2]]
    pieces[:, :2] = 0  # ranges of two documents that touch are one
    return joined(pieces)[:, 2:]


def _reversed(
    places: Int64Array, begin: Int64Array, end: Int64Array, lens: Int64Array
) -> Int64Array:
    """The real tokens `[begin, end)` of documents counted from their ends, and their pads."""
    real = np.stack([lens - np.minimum(end, lens), lens - np.minimum(begin, lens)], axis=1)
    pads = np.stack([np.maximum(begin, lens), np.maximum(end, lens)], axis=1)
    pieces = np.concatenate([np.hstack([places, real]), np.hstack([places, pads])])
    return pieces[pieces[:, 2] < pieces[:, 3]]


def joined(pieces: Int64Array) -> Int64Array:
    """Pieces `[n, 4]` in order, those that touch as one."""
    pieces = pieces[np.lexsort(pieces.T[2::-1])]
    touches = (pieces[1:, :2] == pieces[:-1, :2]).all(axis=1) & (pieces[1:, 2] == pieces[:-1, 3])
    is_first = np.concatenate([[True], ~touches])[: len(pieces)]
    is_last = np.concatenate([~touches, [True]])[: len(pieces)]
    return np.concatenate([pieces[is_first, :3], pieces[is_last, 3:]], axis=1)
