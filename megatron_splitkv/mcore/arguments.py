"""Command-line arguments of Split-KV, and the checks that can be made from arguments alone.

The same text is raised on every rank, before any model or process group exists. What a
configuration object can also hold is checked again in the module's constructor (`refusals`).
"""

import importlib.util
import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Sequence

import torch

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.argument_refusals import OTHER_IMPL, refuse_unsupported_args
from megatron_splitkv.mcore.model_arguments import ROUTE_CHOICES, route_from_args
from megatron_splitkv.mcore.timing import timing_from_args

IMPLEMENTATIONS = ("megatron", "splitkv")


def requested_impl(argv: Sequence[str]) -> str:
    """Reads `--context-parallel-impl` from a command line whose other arguments are unknown.

    Raises:
        ValueError: it is none of `IMPLEMENTATIONS`.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--context-parallel-impl", default=IMPLEMENTATIONS[0])
    impl = parser.parse_known_args(list(argv))[0].context_parallel_impl
    _check_impl(impl)
    return impl


def check_command_line(argv: Sequence[str]) -> None:
    """Refuses what bypasses Megatron's argument validation, where our checks are made.

    Raises:
        UnsupportedError: `--yaml-cfg` is given.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg", default=None)
    path = parser.parse_known_args(list(argv))[0].yaml_cfg
    if path is not None:
        raise UnsupportedError(
            f"--yaml-cfg {path} bypasses the checks of --context-parallel-impl splitkv; give the "
            f"settings as arguments, {OTHER_IMPL}"
        )


def add_splitkv_args(parser: ArgumentParser) -> ArgumentParser:
    """Adds our arguments to Megatron's parser.

    Args:
        parser: any argument parser; a script of one's own passes this function to Megatron as
            `extra_args_provider`. One that has our arguments already, as under the launcher, is
            left as it is.
    Returns:
        The same parser.
    """
    if "--context-parallel-impl" in parser._option_string_actions:
        return parser
    defaults = SplitKVConfig()
    group = parser.add_argument_group(title="split-kv context parallelism")
    # Unknown words are refused by validate_splitkv_args in one line; argparse's own `choices`
    # would print the usage of Megatron's eight hundred arguments first.
    group.add_argument(
        "--context-parallel-impl",
        default=IMPLEMENTATIONS[0],
        metavar="{" + ",".join(IMPLEMENTATIONS) + "}",
        help="who does context parallelism: megatron leaves Megatron untouched; splitkv gives "
        "ranks equal work and sends queries or keys, see --splitkv-route (default: megatron)",
    )
    group.add_argument(
        "--splitkv-block-size",
        type=int,
        default=defaults.block_size,
        metavar="N",
        help="tokens of one block of the planner, a multiple of 64, such as 256: smaller balances "
        "better, larger sends fewer pieces (default: by sequence length, at most 512)",
    )
    group.add_argument(
        "--splitkv-stages",
        type=int,
        default=defaults.num_stages,
        metavar="N",
        help="most exchanges that the other ranks' queries, or the KV heads, are cut into: 1 is "
        "everything at once, 8 takes less memory and overlaps more (default: as many that each "
        "brings about half the rows of a rank, or 8192; at most 2 groups of KV heads)",
    )
    _add_exchange_args(group, defaults)
    _add_balance_args(group, defaults)
    return parser


def _add_exchange_args(group: _ArgumentGroup, defaults: SplitKVConfig) -> None:
    """What travels, what is kept of it, and how ranks agree."""
    group.add_argument(
        "--splitkv-route",
        default=ROUTE_CHOICES[0],
        metavar="{" + ",".join(ROUTE_CHOICES) + "}",
        help="what travels: queries to the keys, or keys and values to the queries, fewer bytes "
        "where several query heads share a key; auto goes by heads, mask and ranks: with 32 heads "
        "in 8 query groups keys travel among up to 16 ranks (default: %(default)s)",
    )
    group.add_argument(
        "--splitkv-partial-dtype",
        default=defaults.partial_dtype,
        metavar="{auto,fp32,bf16,fp16}",
        help="what partial outputs and gradients travel in; fp16 travels with a scale for "
        "each row and head, at half the bytes of fp32 and nearly its error; auto is fp16 for "
        "bf16 models, else fp32 (default: %(default)s)",
    )
    group.add_argument(
        "--splitkv-transport",
        default=defaults.transport,
        metavar="{auto,nccl,symmetric,gloo}",
        help="what rows travel by: symmetric has the GPUs of one host read each other's memory by "
        "copy engines; auto is that where it can be had, else the backend of the process group; "
        "gloo stages the rows of a GPU through host memory, for processes that share one "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--splitkv-keep-queries",
        action="store_true",
        help="keep gathered queries or keys for the backward pass: fewer bytes, more memory "
        "(default: gather them again)",
    )
    group.add_argument(
        "--splitkv-check-plan",
        default=defaults.check_plan,
        metavar="{first,always}",
        help="compare the ranks' plans at the first microbatch, or at each new plan, which costs "
        "a small exchange (default: %(default)s)",
    )
    group.add_argument(
        "--splitkv-mtp-normalization",
        default=defaults.mtp_normalization,
        metavar="{global,megatron}",
        help="scale multi-token-prediction losses by token counts of the whole sequence, as "
        "without context parallelism, or by each rank's own, as Megatron does "
        "(default: %(default)s)",
    )


def _add_balance_args(group: _ArgumentGroup, defaults: SplitKVConfig) -> None:
    """What the planner balances, and how closely."""
    group.add_argument(
        "--splitkv-balance-tolerance",
        type=float,
        default=defaults.balance_tolerance,
        metavar="F",
        help="share by which the busiest rank may exceed the mean before documents that would fit "
        "on one rank are cut; 0.05 is five percent (default: %(default)s)",
    )
    group.add_argument(
        "--splitkv-ranks-per-node",
        type=int,
        default=defaults.ranks_per_node,
        metavar="N",
        help="consecutive context-parallel ranks that share a node, such as 8 without tensor "
        "parallelism, 4 with --tensor-model-parallel-size 2: documents keep to few nodes "
        "(default: none, all ranks are equally near)",
    )
    group.add_argument(
        "--splitkv-rank-speeds",
        default="",
        metavar="S,S,...",
        help="relative speed of each context-parallel rank, such as 1,1,0.8,1: a slower one gets "
        "less of the work, as far as keys differ in cost; tokens stay equal (default: all alike)",
    )
    group.add_argument(
        "--splitkv-calibration",
        default=None,
        metavar="FILE",
        help="kernel times that tools/calibrate.py measured, the same file for all ranks: each "
        "pack takes the tolerance with the least predicted time (default: none)",
    )


def splitkv_config_from_args(args: Namespace) -> SplitKVConfig:
    """The configuration that the parsed arguments describe.

    The route "auto" is resolved by the model's heads, its mask and the ranks.

    Raises:
        ValueError: a value is out of range or unknown, or a route that the mask has not.
    """
    return SplitKVConfig(
        block_size=args.splitkv_block_size,
        route=route_from_args(args),
        num_stages=args.splitkv_stages,
        partial_dtype=args.splitkv_partial_dtype,
        transport=args.splitkv_transport,
        keep_queries=args.splitkv_keep_queries,
        balance_tolerance=args.splitkv_balance_tolerance,
        ranks_per_node=args.splitkv_ranks_per_node,
        rank_speeds=_rank_speeds(args.splitkv_rank_speeds),
        check_plan=args.splitkv_check_plan,
        mtp_normalization=args.splitkv_mtp_normalization,
    )


def _rank_speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(speed) for speed in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(
            f"--splitkv-rank-speeds={text} must be numbers between commas, one for each rank of "
            "--context-parallel-size"
        ) from None


def validate_splitkv_args(args: Namespace) -> list[str]:
    """Checks a parsed Megatron command line; call it before Megatron's own validation.

    Args:
        args: parsed arguments. Two defaults of Megatron's that have no use here are switched: the
            dense attention mask that the dataloader would make, and fused rotary embedding of
            packed documents, which knows only Megatron's own token order.
    Returns:
        One sentence for each setting that was switched or is ignored; print them on one rank.
    Raises:
        ValueError: a value that can be put right.
        UnsupportedError: a setting that Split-KV would not honour.
    """
    _check_impl(args.context_parallel_impl)
    config = splitkv_config_from_args(args)
    refuse_unsupported_args(args)
    timing_from_args(args)
    _check_nodes(args, config)
    _check_lengths(args)
    _check_rotary(args)
    if is_packed(args):
        _check_packed(args)
    _check_loss(args)
    return _switch_defaults(args, config)


def check_stock_context_parallelism(args: Namespace) -> None:
    """Refuses, before Megatron asserts in a layer, what its own context parallelism cannot do.

    Raises:
        UnsupportedError: several context-parallel ranks, and no GPU or no Transformer Engine.
    """
    if args.context_parallel_size == 1:
        return
    missing = []
    if not torch.cuda.is_available():
        missing.append("no CUDA device")
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("no transformer-engine")
    if missing:
        raise UnsupportedError(
            f"--context-parallel-size={args.context_parallel_size} with --context-parallel-impl "
            "megatron needs transformer-engine and a GPU, and there is "
            f"{' and '.join(missing)}; use --context-parallel-size 1 or --context-parallel-impl "
            "splitkv"
        )


def is_packed(args: Namespace) -> bool:
    """Whether batches hold several documents a sequence, and say so by `cu_seqlens`."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def _check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"--context-parallel-impl {impl} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}"
        )


def _check_nodes(args: Namespace, config: SplitKVConfig) -> None:
    per_node, cp_size = config.ranks_per_node, args.context_parallel_size
    if config.rank_speeds and len(config.rank_speeds) != cp_size:
        raise ValueError(
            f"--splitkv-rank-speeds names {len(config.rank_speeds)} ranks, and "
            f"--context-parallel-size={cp_size} has {cp_size}; give a speed for each"
        )
    if per_node is not None and cp_size % per_node:
        raise ValueError(
            f"--splitkv-ranks-per-node={per_node} must divide --context-parallel-size={cp_size}: "
            "nodes hold equally many ranks of a group; leave it out if a group fits on one node"
        )


def _check_lengths(args: Namespace) -> None:
    """Every rank holds equally many tokens; Megatron itself asks for twice that divisor."""
    length, cp_size = args.seq_length or args.encoder_seq_length, args.context_parallel_size
    if length is not None and cp_size > 1 and length % (2 * cp_size):
        near = -(-length // (2 * cp_size)) * 2 * cp_size
        raise ValueError(
            f"--seq-length={length} must be a multiple of 2 * --context-parallel-size ({cp_size}) "
            f"= {2 * cp_size}, because ranks hold equally many tokens (and Megatron asserts the "
            f"factor 2); use {near}"
        )


def _check_rotary(args: Namespace) -> None:
    if args.multi_latent_attention and args.apply_rope_fusion:
        raise UnsupportedError(
            "--multi-latent-attention with fused rotary embedding does not work with "
            "--context-parallel-impl splitkv: the fused kernel assumes Megatron's own order of "
            f"tokens; add --no-rope-fusion, {OTHER_IMPL}"
        )


def _check_packed(args: Namespace) -> None:
    several = args.micro_batch_size is not None and args.micro_batch_size > 1
    balancing = args.moe_router_load_balancing_type
    if several and args.num_experts and "seq_aux_loss" in balancing:
        raise UnsupportedError(
            f"--moe-router-load-balancing-type={balancing} with packed documents and "
            f"--micro-batch-size={args.micro_batch_size} does not work with "
            "--context-parallel-impl splitkv: a rank does not hold whole sequences; use aux_loss, "
            f"or --micro-batch-size 1, {OTHER_IMPL}"
        )
    dispatcher = args.moe_token_dispatcher_type
    stages = args.pipeline_model_parallel_size
    if several and args.num_experts and stages > 1 and dispatcher == "allgather":
        raise UnsupportedError(
            f"--moe-token-dispatcher-type={dispatcher} does not take the variable lengths that "
            f"packed documents need with --pipeline-model-parallel-size={stages} and "
            f"--micro-batch-size={args.micro_batch_size}; use alltoall, or --micro-batch-size 1"
        )
    if args.overlap_moe_expert_parallel_comm:
        raise UnsupportedError(
            "--overlap-moe-expert-parallel-comm with packed documents does not work with "
            "--context-parallel-impl splitkv: its schedule drops the document bounds; leave it "
            f"out, {OTHER_IMPL}"
        )


def _check_loss(args: Namespace) -> None:
    """Ranks that count different numbers of loss tokens must not each take their own mean."""
    uneven = args.context_parallel_size > 1 and (is_packed(args) or args.eod_mask_loss)
    if uneven and not args.calculate_per_token_loss:
        cause = "packed documents" if is_packed(args) else "--eod-mask-loss"
        raise ValueError(
            f"{cause} with --context-parallel-size={args.context_parallel_size} needs "
            "--calculate-per-token-loss: ranks count different numbers of loss tokens, and a mean "
            "over each rank's own would be biased; add --calculate-per-token-loss"
        )


def _share_devices(args: Namespace) -> list[str]:
    """Over gloo the ranks of a machine may outnumber its GPUs; Megatron would name missing ones."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.distributed_backend != "gloo" or not 0 < num_gpus < num_ranks:
        return []
    args.local_rank %= num_gpus
    return [f"{num_ranks} ranks share {num_gpus} GPU(s): a way to test, not to train"]


def _switch_defaults(args: Namespace, config: SplitKVConfig) -> list[str]:
    notes = _share_devices(args)
    if args.create_attention_mask_in_dataloader and not is_packed(args):  # else Megatron does it
        args.create_attention_mask_in_dataloader = False
        notes.append("set --no-create-attention-mask-in-dataloader: the plan is the mask")
    if is_packed(args) and args.apply_rope_fusion:
        args.apply_rope_fusion = False
        notes.append("set --no-rope-fusion: the fused kernel knows only Megatron's token order")
    if args.cp_comm_type not in (None, "p2p", ["p2p"]):
        words = (
            args.cp_comm_type if isinstance(args.cp_comm_type, str) else " ".join(args.cp_comm_type)
        )
        notes.append(f"ignoring --cp-comm-type {words}: {config.route} travel, whatever it says")
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend not in (None, "auto"):
        notes.append(f"ignoring --attention-backend {backend}: attention is Split-KV's own")
    return notes
