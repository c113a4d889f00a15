"""A checkpoint saved at one context-parallel size resumes at another, under Megatron's own keys."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_splitkv.config import SplitKVConfig
from tests.gloo import run_gloo
from tests.mcore.jobs import Result, train
from tests.mcore.toy_model import build_model, megatron_groups

PACKED = "--dataloader-inter-document-masking"
DISTRIBUTED = "--ckpt-format torch_dist --softmax-type learnable --override-opt-param-scheduler"
BLOCK_MASK = "--reset-position-ids --reset-attention-mask"


def checkpoint_keys(result: Result) -> set[str]:
    reader = FileSystemReader(result.folder / "iter_0000002")
    keys = reader.read_metadata().state_dict_metadata
    return {key for key in keys if not key.startswith("rerun_state_machine")}  # one a rank


@pytest.mark.timeout(600)
def test_saved_at_cp2_it_resumes_at_cp1_and_cp4(tmp_path: Path, text_data: Path) -> None:
    whole = train(tmp_path / "whole", text_data, f"{PACKED} {DISTRIBUTED}", iterations=4)
    saved = train(tmp_path / "saved", text_data, f"{PACKED} {DISTRIBUTED}", cp=2, iterations=2)
    for cp in (1, 4):
        load = f"{PACKED} {DISTRIBUTED} --load {saved.folder}"
        resumed = train(tmp_path / f"cp{cp}", text_data, load, cp=cp, iterations=4)
        third, fourth = whole.losses["lm loss"][2:]
        # After a resume Megatron's second line is the mean of the first two steps.
        expected = [third, (third + fourth) / 2]
        assert resumed.losses["lm loss"] == pytest.approx(expected, rel=1e-5)

    stock = f"{BLOCK_MASK} {DISTRIBUTED}"
    megatron = train(tmp_path / "stock", text_data, stock, impl="megatron", iterations=2)
    assert checkpoint_keys(saved) == checkpoint_keys(megatron)
    assert any("softmax_offset" in key for key in checkpoint_keys(saved))


def check_extra_state() -> None:
    """Keys that Transformer Engine's attention adds to a `torch` checkpoint are no error."""
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        model = build_model(whole, PlanBook(SplitKVConfig()))
        prefix = "decoder.layers.1.self_attention.core_attention"
        state = model.state_dict()
        assert f"{prefix}._extra_state" not in state
        model.load_state_dict({**state, f"{prefix}._extra_state": torch.zeros(0)})
        with pytest.raises(RuntimeError, match=f"Unexpected key.*{prefix}.other"):
            model.load_state_dict({**state, f"{prefix}.other": torch.zeros(0)})


def test_checkpoints_of_transformer_engine_load() -> None:
    run_gloo(1, check_extra_state)
