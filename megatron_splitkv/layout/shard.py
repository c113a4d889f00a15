"""Token rows of a rank: which ones, and how a tensor is cut and put together again."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.plan import Plan
from megatron_splitkv.plan.plan import Int64Array


def expand_ranges(ranges: Int64Array) -> Int64Array:
    """Lists the integers of sorted disjoint ranges: `[[2, 4], [7, 9]]` -> `[2, 3, 7, 8]`."""
    lengths = ranges[:, 1] - ranges[:, 0]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(ranges[:, 0] - (ends - lengths), lengths)


def token_index(plan: Plan, rank: int) -> Int64Array:
    """KV tokens of a rank as indices of the pack, `[n]` int64, ascending.

    Ascending indices are also ordered by (document, position), which makes the keys that a query
    row sees on the rank one contiguous range.
    """
    doc_starts = np.concatenate([[0], np.cumsum(plan.padded_lens, dtype=np.int64)])
    runs = plan.runs[plan.runs[:, 0] == rank]
    starts = doc_starts[runs[:, 1]]
    return expand_ranges(np.stack([starts + runs[:, 2], starts + runs[:, 3]], axis=1))


def shard_rows(tensor: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Takes a rank's tokens out of a tensor over the whole pack.

    Args:
        tensor: any dtype and device, the pack along `dim`.
        index: `ShardLayout.kv_index`, on the same device.
        dim: dimension of the tokens.
    """
    return tensor.index_select(dim, index)


def unshard_rows(shards: Sequence[Tensor], plan: Plan, dim: int = 0) -> Tensor:
    """Puts the shards of all ranks back into pack order; the inverse of `shard_rows`.

    Args:
        shards: one tensor for each rank, in rank order, its tokens along `dim`.
        plan: the plan that cut them.
        dim: dimension of the tokens.
    Raises:
        ValueError: the number of shards is not `plan.cp_size`.
    """
    if len(shards) != plan.cp_size:
        raise ValueError(f"got {len(shards)} shards for a plan with cp_size={plan.cp_size}")
    order = np.concatenate([token_index(plan, rank) for rank in range(plan.cp_size)])
    back = torch.from_numpy(np.argsort(order)).to(shards[0].device)
    return torch.cat(list(shards), dim).index_select(dim, back)
