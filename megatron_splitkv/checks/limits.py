"""The limits that `verify` holds results to, each with its reason.

Inputs are rounded before the oracle sees them, so what remains is the arithmetic and the rounding
of what is written: limits go by the device and the dtype of the *result*. One wrong key among 1000
is 1e-3 in a row, a softmax scale that is off by 1 % about 1e-2.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_splitkv.config import SplitKVConfig

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Kind = Literal["out", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest errors, as `oracle.Error` has them."""

    rel_l2: float
    worst_row: float


# fp32 sums of at most a few thousand terms: up to 6e-7 in norm was seen, 5e-6 in the worst row.
FP32 = Limit(rel_l2=1e-5, worst_row=5e-5)

# One rounding to 8 (bf16) or 11 (fp16) significant bits of what is returned, and on a GPU as much
# again of the probabilities that the tensor cores take. Gradients also carry the rounding of out
# through delta, which stays in early rows where the rest cancels.
_OUT = {
    torch.bfloat16: Limit(rel_l2=3e-3, worst_row=8e-3),
    torch.float16: Limit(rel_l2=5e-4, worst_row=1.2e-3),
}
_GRADIENT = {
    torch.bfloat16: Limit(rel_l2=5e-3, worst_row=3e-2),
    torch.float16: Limit(rel_l2=1e-3, worst_row=5e-3),
}

# A log-sum-exp is one fp32 number; hardware exponentials of a GPU are good to 2^-22.
LSE = {"cpu": 2e-6, "cuda": 1e-5}

# What the format of returned partials may add: one rounding of each partial.
_WIRE = {
    "fp32": Limit(rel_l2=0.0, worst_row=0.0),
    "bf16": Limit(rel_l2=3e-3, worst_row=2e-2),
    "fp16": Limit(rel_l2=5e-4, worst_row=3e-3),
}

# Error in a group over the error on one rank, by the format of partials. bf16 rounds every partial
# as coarsely as a result: 1.2 to 1.45 times the error was seen, so it is never the default.
GROWTH = {"fp32": 1.25, "fp16": 1.25, "bf16": 1.75}

BYTES = 0.02  # share by which bytes may differ from the plan's prediction

# A small GPT, its first step. fp32: sums in another order, about 3e-7 seen, a fault starts at 1e-4.
# bf16: beside the same model in fp32, a gradient may be this much further off than the stock
# model's in bf16; two roundings of the same size, drawn independently, stay within it.
MODEL_FP32_LOSS = 1e-5
MODEL_FP32_GRADIENT = 1e-5
MODEL_BF16_LOSS = 1e-3
MODEL_BF16_OVER_STOCK = 1.5
MODEL_GRADIENT_NORM = 2e-3


def op_limit(kind: Kind, dtype: torch.dtype, device: torch.device) -> Limit:
    """For an op with fp32 results. CPU kernels compute in fp32 whatever the inputs are."""
    if device.type == "cpu" or dtype == torch.float32:
        return FP32
    return (_OUT if kind == "out" else _GRADIENT)[dtype]


def wire_limit(dtype: torch.dtype, config: SplitKVConfig) -> Limit:
    """What the format of returned partials may add to any result for inputs of `dtype`."""
    return _WIRE[config.resolved_partial_dtype(DTYPE_NAMES[dtype])]


def attention_limit(kind: Kind, dtype: torch.dtype, config: SplitKVConfig) -> Limit:
    """For a whole attention call, whose results have the dtype of its inputs."""
    base = FP32 if dtype == torch.float32 else (_OUT if kind == "out" else _GRADIENT)[dtype]
    wire = wire_limit(dtype, config)
    return Limit(rel_l2=base.rel_l2 + wire.rel_l2, worst_row=base.worst_row + wire.worst_row)


def lse_limit(device: torch.device) -> float:
    """For log-sum-exps, as `oracle.lse_error` measures them."""
    return LSE[device.type]
