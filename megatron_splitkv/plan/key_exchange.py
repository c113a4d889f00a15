"""Where keys travel: which of them go from which rank to which, counted from the plan alone."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import megatron_splitkv._planner as _planner
from megatron_splitkv.plan.exchange import between_ranks, owned_rows, plan_exchange
from megatron_splitkv.plan.mirror import mirrored_ranges
from megatron_splitkv.plan.plan import Int64Array, Plan
from megatron_splitkv.plan.queries import Queries
from megatron_splitkv.plan.route import check_route

# Head groups that are not asked for: the wire of all but the first is hidden behind attention, and
# each fills the GPU once more. So many at most (with 4 the backward of a pile of short documents
# took 38 % longer than with 2), and each of so many query rows times heads.
HEAD_GROUPS = 2
MIN_ROWS_OF_GROUP = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExchange:
    """Keys of shared documents, those with keys on several ranks, that each rank owns and needs.

    A document that is whole on a rank is attended to where it lies. Of a shared one a rank gathers
    all keys that its rows see, its own among them, so that they lie in order.

    Attributes:
        is_shared: for each document, `[num_docs]` bool; False for one of pads alone.
        owned: for each rank `[n, 2]` int64 ranges of the token stream, sorted and disjoint.
        needed: likewise, the keys that at least one row of the rank sees.
        counts: `[cp_size, cp_size]` int64: keys that rank `s` owns and rank `r` needs.
    """

    is_shared: npt.NDArray[np.bool_]
    owned: tuple[Int64Array, ...]
    needed: tuple[Int64Array, ...]
    counts: Int64Array

    def ranges(self, source: int, destination: int) -> Int64Array:
        """Ranges of the token stream that `source` sends to `destination`, `[n, 2]`."""
        return _planner.intersect(self.owned[source], self.needed[destination])

    def travelling(self) -> Int64Array:
        """Keys of each rank that each other one needs, `[cp_size, cp_size]`, 0 on the diagonal."""
        return between_ranks(self.counts)


def num_head_groups(
    num_heads_kv: int, num_heads_q: int, num_rows: int, num_stages: int | None
) -> int:
    """Groups of KV heads that travel one after the other; equally many heads in each.

    Args:
        num_heads_kv, num_heads_q: of one tensor-parallel rank.
        num_rows: the most query rows that a rank owns.
        num_stages: upper bound; None bounds the rows of a group instead.
    """
    if num_stages is None:
        num_stages = min(HEAD_GROUPS, num_rows * num_heads_q // MIN_ROWS_OF_GROUP)
    most = max(1, min(num_heads_kv, num_stages))
    return next(num for num in range(most, 0, -1) if num_heads_kv % num == 0)


def travelling_rows(plan: Plan) -> Int64Array:
    """Rows of queries or of keys, as the plan has it, that each rank needs of each other one,
    `[cp_size, cp_size]`.
    """
    exchange = plan_key_exchange(plan) if plan.route == "keys" else plan_exchange(plan)
    return exchange.travelling()


def plan_key_exchange(plan: Plan, queries: Queries | None = None) -> KeyExchange:
    """Finds the keys to exchange for one attention call over the plan's placement.

    Args:
        plan: the placement.
        queries: the mask of this call where it differs from the plan's own spec, as in a model
            that mixes window and full layers.
    Raises:
        ValueError: the mask has no such route, see `check_route`.
    """
    spec = queries or plan.queries
    check_route("keys", spec)
    doc_lens = np.asarray(plan.doc_lens, dtype=np.int64)
    doc_starts = np.concatenate([[0], np.cumsum(plan.padded_lens, dtype=np.int64)])
    on_ranks = np.unique(plan.runs[:, :2], axis=0)[:, 1]
    is_shared = (np.bincount(on_ranks, minlength=len(doc_lens)) > 1) & (doc_lens > 0)
    shared = np.stack([doc_starts[:-1], doc_starts[1:]], axis=1)[is_shared]
    owned = tuple(_planner.intersect(ranges, shared) for ranges in owned_rows(plan))
    seen = _planner.needed_rows(plan.model(spec), plan.mirrored_runs, plan.cp_size)
    needed = tuple(
        _planner.intersect(mirrored_ranges(keys, doc_lens, doc_starts), shared) for keys in seen
    )
    return KeyExchange(
        is_shared=is_shared,
        owned=owned,
        needed=needed,
        counts=_planner.row_counts(owned, needed),
    )
