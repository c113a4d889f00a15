"""Row sums of `dout * out` on the CPU, and what the op refuses."""

import pytest
import torch

from megatron_splitkv.ops import attention_delta


def test_equals_fp64() -> None:
    dout, out = torch.randn(7, 3, 33).bfloat16(), torch.randn(7, 3, 33)
    expected = (dout.double() * out.double()).sum(dim=-1)
    torch.testing.assert_close(attention_delta(dout, out).double(), expected, rtol=1e-5, atol=1e-5)


def test_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"out has shape \[7, 3, 32\], needs \[7, 3, 33\]"):
        attention_delta(torch.zeros(7, 3, 33), torch.zeros(7, 3, 32))
