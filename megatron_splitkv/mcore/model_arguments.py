"""What Megatron's arguments say of a model's attention: heads, mask, and so what should travel."""

from argparse import Namespace

from megatron_splitkv.plan import Causal, Queries, Window, check_route, choose_route
from megatron_splitkv.plan.report import AttentionShape

ROUTE_CHOICES = ("auto", "queries", "keys")


def attention_shape_from_args(args: Namespace) -> AttentionShape:
    """Heads and dims of one tensor-parallel rank.

    Raises:
        ValueError: the arguments do not say what heads there are, or heads that do not fit.
    """
    heads, tp_size = args.num_attention_heads, args.tensor_model_parallel_size
    if not _says_heads(args):
        raise ValueError("give --num-attention-heads and --hidden-size too, not by a checkpoint")
    dim_qk = dim_v = args.kv_channels or args.hidden_size // heads
    if args.multi_latent_attention:
        dim_qk, dim_v = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    groups = args.num_query_groups if args.group_query_attention else heads
    return AttentionShape(
        num_heads_q=heads // tp_size,
        num_heads_kv=max(1, groups // tp_size),  # fewer groups than ranks: each has one
        head_dim_qk=dim_qk,
        head_dim_v=dim_v,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    )


def placement_queries(args: Namespace) -> Queries:
    """The mask that placement balances: the window if every layer has it, else causal."""
    window, skip = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    return Window(window[0] + 1) if window and skip is None else Causal()


def route_from_args(args: Namespace) -> str:
    """What `--splitkv-route` names, "queries" or "keys"; auto goes by heads, mask, ranks
    and `--splitkv-stages`.

    Auto is "queries" where the heads come with a checkpoint and no argument says them.

    Raises:
        ValueError: an unknown word, a mask without that route, or heads that do not fit.
    """
    route, queries = args.splitkv_route, placement_queries(args)
    if route not in ROUTE_CHOICES:
        raise ValueError(
            f"--splitkv-route {route} is unknown; choose one of {', '.join(ROUTE_CHOICES)}"
        )
    if route != "auto":
        try:
            check_route(route, queries)
        except ValueError as error:
            raise ValueError(f"--splitkv-route {route}: {error}") from None
        return route
    if args.context_parallel_size == 1 or not _says_heads(args):
        return "queries"
    return choose_route(
        attention_shape_from_args(args),
        args.context_parallel_size,
        queries,
        num_stages=args.splitkv_stages,
    )


def _says_heads(args: Namespace) -> bool:
    return args.num_attention_heads is not None and args.hidden_size is not None
