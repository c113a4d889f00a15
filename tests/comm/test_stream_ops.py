"""Flags that count up, as the host reads them."""

import pytest

from megatron_splitkv.comm.stream_ops import has_reached


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 5 * 2**32 + 7])
def test_a_count_may_wrap_around(value):
    word = value % 2**32
    signed = word - 2**32 if word >= 2**31 else word  # how the host reads it
    assert has_reached(signed, value)
    assert has_reached(signed, value - 1)
    assert has_reached(signed, value - 2**31 + 1)
    assert not has_reached(signed, value + 1)
    assert not has_reached(signed, value + 2**31)
