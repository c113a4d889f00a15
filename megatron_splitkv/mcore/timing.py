"""What the time of a layer is predicted from, read from arguments."""

from argparse import Namespace

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Timing
from megatron_splitkv.plan.predict import read_calibration
from megatron_splitkv.plan.report import AttentionShape


def timing_from_args(args: Namespace) -> Timing | None:
    """The calibration of `--splitkv-calibration` for the model's attention; None without it.

    Raises:
        ValueError: the file cannot be read, is no calibration or one of another head dim or dtype,
            or the arguments do not say what heads there are, or also give a tolerance.
    """
    path, tolerance = args.splitkv_calibration, args.splitkv_balance_tolerance
    if path is None:
        return None
    if tolerance != SplitKVConfig().balance_tolerance:
        raise ValueError(
            "--splitkv-calibration chooses the tolerance of each pack; leave out "
            f"--splitkv-balance-tolerance={tolerance}, or the calibration"
        )
    try:
        return Timing(calibration=read_calibration(path), shape=_attention_shape(args))
    except (OSError, ValueError) as error:
        raise ValueError(f"--splitkv-calibration: {error}") from None


def _attention_shape(args: Namespace) -> AttentionShape:
    """Of one tensor-parallel rank."""
    heads = args.num_attention_heads
    if heads is None or args.hidden_size is None:
        raise ValueError("give --num-attention-heads and --hidden-size too, not by a checkpoint")
    dim_qk = dim_v = args.kv_channels or args.hidden_size // heads
    if args.multi_latent_attention:
        dim_qk, dim_v = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return AttentionShape(
        num_heads_q=heads // args.tensor_model_parallel_size,
        head_dim_qk=dim_qk,
        head_dim_v=dim_v,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    )
