"""Which route a run should take, from its heads and the size of its group."""

from megatron_splitkv.plan.key_exchange import HEAD_GROUPS, MIN_ROWS_OF_GROUP, num_head_groups
from megatron_splitkv.plan.queries import Queries
from megatron_splitkv.plan.report import AttentionShape
from megatron_splitkv.plan.route import has_route


def choose_route(
    shape: AttentionShape, cp_size: int, queries: Queries, *, num_stages: int | None = None
) -> str:
    """Whether keys or queries should travel.

    Keys travel where the mask has that route, where they are fewer elements a token in a layer
    forward and backward, and where what a rank gathers of one group of KV heads is, at worst of the
    whole context, no larger than its own queries and outputs. What it keeps of earlier groups comes
    on top (`SplitKVConfig.keep_queries`).

    Args:
        shape: of the attention on one tensor-parallel rank.
        cp_size: ranks of the context-parallel group.
        queries: the mask that placement balances.
        num_stages: as in `SplitKVConfig`: the upper bound on the groups.
    Returns:
        "queries" or "keys".
    """
    if cp_size == 1 or not has_route("keys", queries):
        return "queries"
    heads_q, heads_kv = shape.num_heads_q, shape.num_heads_kv
    # q, out, dout, q once more, dq; k and v twice, dk and dv once.
    by_queries = heads_q * (3 * shape.head_dim_qk + 2 * shape.head_dim_v)
    by_keys = heads_kv * 3 * (shape.head_dim_qk + shape.head_dim_v)
    many_rows = HEAD_GROUPS * MIN_ROWS_OF_GROUP
    num_groups = num_head_groups(heads_kv, heads_q, many_rows, num_stages)
    # Keys and values of some heads, beside queries and outputs of all: the same dims.
    is_small = cp_size * (heads_kv // num_groups) <= 2 * heads_q
    return "keys" if by_keys < by_queries and is_small else "queries"
