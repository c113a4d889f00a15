"""Which route a run should take, from its heads and the size of its group."""

from megatron_splitkv.plan.key_exchange import HEAD_GROUPS
from megatron_splitkv.plan.queries import Queries
from megatron_splitkv.plan.route import has_route


def choose_route(
    *,
    cp_size: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    queries: Queries,
) -> str:
    """Whether keys or queries should travel.

    Keys travel where the mask has that route, where they are fewer elements a token in a layer
    forward and backward, and where what a rank gathers of one group of KV heads is, at worst of the
    whole context, no larger than its own queries and outputs.

    Args:
        cp_size: ranks of the context-parallel group.
        num_heads_q, num_heads_kv: heads of one tensor-parallel rank.
        head_dim_qk, head_dim_v: elements of a query or key head, and of a value head.
        queries: the mask that placement balances.
    Returns:
        "queries" or "keys".
    """
    if cp_size == 1 or not has_route("keys", queries):
        return "queries"
    # q, out, dout, q once more, dq; k and v twice, dk and dv once.
    by_queries = num_heads_q * (3 * head_dim_qk + 2 * head_dim_v)
    by_keys = num_heads_kv * 3 * (head_dim_qk + head_dim_v)
    num_groups = max(num for num in range(1, HEAD_GROUPS + 1) if num_heads_kv % num == 0)
    gathered = cp_size * num_heads_kv // num_groups * (head_dim_qk + head_dim_v)
    is_small = gathered <= 2 * num_heads_q * (head_dim_qk + head_dim_v)
    return "keys" if by_keys < by_queries and is_small else "queries"
