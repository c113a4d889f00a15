"""The launcher: what it refuses, what it changes, and runs from start to end."""

import sys

import pytest
import torch
from megatron.core import utils as mcore_utils
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import launch
from tests.mcore import runs

PACKED = "--dataloader-inter-document-masking"
SPLITKV = ("--context-parallel-impl", "splitkv")
CP2 = ("--context-parallel-size", "2")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return runs.write_dataset(tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="module")
def reference(dataset):
    """One process, Megatron's own attention, documents kept apart by a dense mask."""
    run = runs.train(dataset, 1, "--reset-position-ids", "--reset-attention-mask")
    assert run.status == 0, run.output
    return run


def close(got, expected, tolerance=1e-5):
    return len(got) == len(expected) and all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(got, expected, strict=True)
    )


def test_without_a_script_it_says_how():
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_splitkv.launch SCRIPT"):
        launch.main([])


def test_missing_script():
    with pytest.raises(ValueError, match=r"script no_such.py does not exist"):
        launch.main(["no_such.py"])


@pytest.mark.parametrize("found", ["0.18.2", "0.20.0", "1.0"])
def test_other_megatron_versions_are_refused(found):
    message = rf"megatron-core {found} is installed; .* pip install megatron-core==0.19.2"
    with pytest.raises(UnsupportedError, match=message):
        launch.check_megatron_version(found)


def test_tested_megatron_version_is_taken():
    launch.check_megatron_version("0.19.2")


def stock_names():
    return (
        mcore_utils.get_batch_on_this_cp_rank,
        rope_utils.get_pos_emb_on_this_cp_rank,
        rope_utils._apply_rotary_pos_emb_thd,
        LocalSpecProvider.core_attention,
    )


@pytest.mark.parametrize("impl", ["megatron", "splitkv"])
def test_install_touches_context_parallelism_only_if_asked(impl):
    before = stock_names()
    launcher = launch.Launcher(impl)
    try:
        launcher.install([])
        changed = [a is not b for a, b in zip(stock_names(), before, strict=True)]
        assert changed == [impl == "splitkv"] * 4
    finally:
        launcher.uninstall()
    assert stock_names() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without CUDA")
def test_script_sees_its_own_arguments_folder_and_name(tmp_path, capfd, monkeypatch):
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script.write_text(
        "import sys\nfrom beside import WORD\n"
        "if __name__ == '__main__':\n    print(WORD, sys.argv[1:])\n"
    )
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    launch.main([str(script), "--lr", "1"])
    assert "found ['--lr', '1']" in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without CUDA")
def test_cpu_run_says_so_and_learns(reference):
    line = reference.line("splitkv: CPU MODE")
    assert "1 gloo process " in line
    assert "--distributed-backend gloo" in line
    assert reference.losses[-1] < reference.losses[0]


def test_splitkv_equals_megatron_and_says_what_is_active(dataset, reference):
    run = runs.train(dataset, 2, PACKED, *SPLITKV, *CP2)
    assert run.status == 0, run.output
    assert close(run.losses, reference.losses)
    line = run.line("splitkv: impl=splitkv")
    for part in ("cp=2", "block_size=", "stages=1", "partial_dtype=fp32", "imbalance=", "hooks=6"):
        assert part in line
    assert "fwd=0.00MB" not in line


def test_sequence_parallel_norms(dataset, reference):
    """Megatron's own fallback norm refuses this; ours gives the same losses."""
    run = runs.train(
        dataset, 2, "--tensor-model-parallel-size", "2", "--sequence-parallel",
        "--make-vocab-size-divisible-by", "257", "--reset-position-ids", "--reset-attention-mask",
    )  # fmt: skip
    assert run.status == 0, run.output
    assert close(run.losses, reference.losses)
    assert close(run.grad_norms, reference.grad_norms, 1e-3)


def test_recomputation_with_hidden_dropout(dataset):
    """Masks are drawn anew in the backward pass, and must come out the same."""
    dropout = ("--hidden-dropout", "0.2", PACKED, *SPLITKV)
    kept = runs.train(dataset, 1, *dropout)
    again = runs.train(
        dataset, 1, *dropout, "--recompute-granularity", "full",
        "--recompute-method", "uniform", "--recompute-num-layers", "1",
    )  # fmt: skip
    assert kept.status == again.status == 0, again.output
    assert again.losses == kept.losses
    assert again.grad_norms == kept.grad_norms


def test_packed_microbatches_pass_between_stages(dataset):
    """Without variable lengths the second stage fails; without its dataset the middle one does."""
    stages = ("--pipeline-model-parallel-size", "3", "--num-layers", "3", PACKED, *SPLITKV)
    one = runs.train(dataset, 3, *stages)
    two = runs.train(dataset, 3, *stages, "--micro-batch-size", "2")
    assert one.status == two.status == 0, one.output + two.output
    assert close(two.losses, one.losses)


def test_bad_setting_ends_every_rank_with_one_message(dataset):
    run = runs.train(dataset, 2, *SPLITKV, *CP2, "--qk-clip")
    assert run.status != 0
    assert "--qk-clip=True does not work with --context-parallel-impl splitkv" in run.output
    assert "building train" not in run.output, "before any data or model"


def test_a_hook_that_was_never_called_is_an_error(tmp_path, dataset):
    """A script that cuts batches its own way would train on the wrong tokens."""
    own = (runs.EXAMPLES / "pretrain_gpt.py").read_text()
    own = own.replace("return get_batch_on_this_cp_rank(", "return (lambda batch, **kw: batch)(")
    script = tmp_path / "own_way.py"
    script.write_text(own)
    run = runs.train(dataset, 1, PACKED, *SPLITKV, script=script)
    assert run.status != 0
    assert "get_batch_on_this_cp_rank was replaced and never called" in run.output


def test_if_one_rank_fails_the_others_end(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\nimport torch\n"
        "torch.distributed.init_process_group('gloo')\n"
        "if torch.distributed.get_rank() == 1:\n"
        "    raise ValueError('broken on purpose')\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
        "torch.distributed.barrier()\n"
    )
    run = runs.launch(2, script, [], timeout_s=60)
    assert run.status != 0
    assert "splitkv: rank 1 of 2 failed: broken on purpose" in run.output
