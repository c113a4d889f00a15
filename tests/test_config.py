"""`SplitKVConfig`: defaults that work, and refusals by message."""

import dataclasses
import re

import pytest

from megatron_splitkv.config import SplitKVConfig


def test_defaults_and_accepted_values():
    assert SplitKVConfig().block_size is None
    assert SplitKVConfig(block_size=64, num_stages=1, balance_tolerance=0.0).block_size == 64
    assert SplitKVConfig(route="keys").route == "keys"
    assert SplitKVConfig(partial_dtype="bf16", check_plan="always").partial_dtype == "bf16"


@pytest.mark.parametrize(
    ("dtype", "resolved"), [("fp32", "fp32"), ("bf16", "fp16"), ("fp16", "fp32")]
)
def test_auto_partials_go_by_the_dtype_of_the_inputs(dtype, resolved):
    assert SplitKVConfig().resolved_partial_dtype(dtype) == resolved
    for named in ("fp32", "bf16", "fp16"):
        assert SplitKVConfig(partial_dtype=named).resolved_partial_dtype(dtype) == named


def test_is_a_value():
    config = SplitKVConfig()
    assert config == SplitKVConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_stages = 2
    with pytest.raises(TypeError):
        SplitKVConfig(blok_size=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"block_size": 96},
            "block_size=96 must be a positive multiple of 64 (the kernels' KV tile); use 128, or "
            "leave it out",
        ),
        ({"block_size": 0}, "block_size=0 must be a positive multiple of 64"),
        ({"block_size": -64}, "block_size=-64 must be a positive multiple of 64"),
        ({"route": "values"}, "route='values' is unknown; choose one of queries, keys"),
        ({"num_stages": 0}, "num_stages=0 must be at least 1"),
        (
            {"partial_dtype": "fp8"},
            "partial_dtype='fp8' is unknown; choose one of auto, fp32, bf16, fp16",
        ),
        (
            {"transport": "mpi"},
            "transport='mpi' is unknown; choose one of auto, nccl, symmetric, gloo",
        ),
        ({"balance_tolerance": 1.5}, "balance_tolerance=1.5 must lie in [0, 1]"),
        ({"balance_tolerance": float("nan")}, "balance_tolerance=nan must lie in [0, 1]"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 must be at least 1; leave it out"),
        ({"check_plan": "never"}, "check_plan='never' is unknown; choose one of first, always"),
        ({"mtp_normalization": "x"}, "mtp_normalization='x' is unknown; choose one of global"),
    ],
)
def test_bad_input_says_what_and_how(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SplitKVConfig(**change)
