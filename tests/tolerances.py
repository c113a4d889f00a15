"""Every tolerance of the suite, with the reason for each number.

The oracle takes the inputs already rounded to the tested dtype, so what remains is the arithmetic
of the kernel (fp32) and the rounding of what it writes. Tolerances therefore go by the dtype of
the *result*, not of the inputs.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest errors that a comparison accepts.

    Attributes:
        rel_l2: norm of the error over norm of the expected tensor.
        worst_row: over rows (last dimension), norm of the row's error over the larger of the
            expected row's norm and the root mean square of all row norms. The second keeps rows
            that cancel to almost nothing from being judged by their own size.
        zero: largest absolute error when the expected tensor is zero everywhere.
    """

    rel_l2: float
    worst_row: float
    zero: float = 0.0


# fp32 accumulation over at most a few thousand terms: measured up to 6e-7 in rel-L2 and 5e-6
# in the worst row. One wrong key among 1000 is 1e-3, so nothing hides in between.
# zero: if no row sees more than one key, dq = dk = 0 by cancellation of two equal numbers dp and
# delta of up to 4 sqrt(Dv), of which each row leaves 2^-23; over R rows of N(0, 1) that adds up to
# 2^-23 * 4 sqrt(Dv R), 6e-5 at Dv = 64 and R = 262. Measured up to 2.2e-5. A wrong key or delta
# leaves more than 1e-2.
FP32 = Tolerance(rel_l2=1e-5, worst_row=5e-5, zero=6e-5)

# For tensors of a few elements: ds = p * (dout.v - delta) may cancel to a small part of its terms,
# with nothing beside it to set the scale; measured up to 2e-5. A wrong key is above 1e-2 there.
FP32_TINY = Tolerance(rel_l2=2e-4, worst_row=1e-3, zero=FP32.zero)

# One rounding to 8 significant bits: at most 2^-8 = 3.9e-3 of a value, 1.7e-3 measured in norm.
BF16 = Tolerance(rel_l2=2e-3, worst_row=4e-3)

# One rounding to 11 significant bits: at most 2^-11 = 4.9e-4 of a value, 2.2e-4 measured in norm.
# Attention outputs of N(0, 1) values stay far above the subnormal range, 6e-5.
FP16 = Tolerance(rel_l2=2.5e-4, worst_row=5e-4)

BY_DTYPE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

# lse is a single fp32 number near log(keys) + score, so compare absolutely, scaled by 1 + |lse|:
# 2^-24 of rounding in lse and in each score. Measured 6e-7.
LSE_ABS = 2e-6

# Gradients of a whole attention call. Beside their own rounding they carry that of out, through
# delta = rowsum(dout * out), which every flash kernel takes from the rounded out. Measured up to
# 2.8e-3 in norm in bf16 and 3.1e-4 in fp16. The worst rows are early ones of a long document with
# nearly all weight on one key: there ds = p * (dp - delta) cancels and the error in delta stays,
# measured up to 1.8e-2 and 1.4e-3. The gradient of a sink, fp32, sees delta alone.
GRADIENT_BY_DTYPE = {
    torch.float32: FP32,
    torch.bfloat16: Tolerance(rel_l2=4e-3, worst_row=3e-2),
    torch.float16: Tolerance(rel_l2=5e-4, worst_row=4e-3),
}

# The tensor cores take probabilities rounded to the dtype of the inputs, by 2^-9 (bf16) or 2^-12
# (fp16) of each, at most, independently: about that much over sqrt(3) of the result.
CUDA_BF16 = Tolerance(rel_l2=3e-3, worst_row=8e-3)
CUDA_FP16 = Tolerance(rel_l2=5e-4, worst_row=1.2e-3)

# Probabilities and ds, each rounded to the dtype of the inputs, as above; ds also cancels in rows
# that see few keys. zero: where every row sees one key, ds = p * (dp - delta) is the rounding of an
# fp32 logit of size 10 times a dp of size sqrt(Dv), summed over the rows.
CUDA_BACKWARD_BY_DTYPE = {
    torch.bfloat16: Tolerance(rel_l2=5e-3, worst_row=3e-2, zero=2e-3),
    torch.float16: Tolerance(rel_l2=1e-3, worst_row=5e-3, zero=2e-3),
}

# Sums of 16-bit products in fp32 and hardware exponentials of 2^-22.
CUDA_LSE_ABS = 1e-5


def cuda_forward(in_dtype: torch.dtype, out_dtype: torch.dtype) -> Tolerance:
    """Of the forward on CUDA: the coarser of the two roundings decides."""
    return CUDA_BF16 if torch.bfloat16 in (in_dtype, out_dtype) else CUDA_FP16
