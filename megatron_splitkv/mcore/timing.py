"""What the time of a layer is predicted from, read from arguments."""

from argparse import Namespace

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore.model_arguments import attention_shape_from_args
from megatron_splitkv.plan import Timing
from megatron_splitkv.plan.predict import read_calibration


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
        return Timing(calibration=read_calibration(path), shape=attention_shape_from_args(args))
    except (OSError, ValueError) as error:
        raise ValueError(f"--splitkv-calibration: {error}") from None
