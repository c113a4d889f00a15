"""Each fix acts where its fault is, and nowhere else."""

from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from megatron_splitkv.mcore import hooks, upstream_fixes


@pytest.mark.parametrize("has_makefile", [False, True])
def test_compiled_helpers_are_not_compiled_again(tmp_path, monkeypatch, has_makefile):
    """The wheel ships the extension without a Makefile; a source tree has both."""
    if has_makefile:
        (tmp_path / "Makefile").touch()
    spec = SimpleNamespace(origin=str(tmp_path / "helpers_cpp.so"))
    monkeypatch.setattr(upstream_fixes.importlib.util, "find_spec", lambda name: spec)
    replacements = upstream_fixes.wheel_replacements()
    assert [item.target for item in replacements] == (
        [] if has_makefile else ["megatron.core.datasets.utils:compile_helpers"]
    )
    installed = hooks.install(replacements)
    if not has_makefile:
        from megatron.core.datasets.utils import compile_helpers

        assert compile_helpers() is None
    installed.uninstall()


def test_helpers_that_were_never_built_are_compiled(monkeypatch):
    monkeypatch.setattr(upstream_fixes.importlib.util, "find_spec", lambda name: None)
    assert upstream_fixes.wheel_replacements() == []


@pytest.mark.parametrize(
    ("is_packed", "tp_rank", "expected"),
    [(True, 0, True), (True, 1, False), (False, 0, False), (False, 1, False)],
)
def test_middle_stages_get_document_lengths(monkeypatch, is_packed, tp_rank, expected):
    """The script asks for no dataset here; packed documents need one on tensor rank 0."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tp_rank)
    (item,) = upstream_fixes.packed_replacements()
    built = []

    def original(self, cls, sizes, is_built_on_rank, config):
        built.append((cls, sizes, is_built_on_rank(), config))

    config = SimpleNamespace(inter_document_masking=is_packed)
    item.function(original, None, dict, [1, 0, 0], lambda: False, config)
    assert built == [(dict, [1, 0, 0], expected, config)]


def test_names_still_have_the_expected_parameters():
    for replacements in (upstream_fixes.packed_replacements(), upstream_fixes.gloo_replacements()):
        hooks.install(replacements).uninstall()


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_buckets_are_reduced_one_by_one_unless_overlapped(is_overlapped):
    (item,) = upstream_fixes.gloo_replacements()

    def original(group, device, async_ops):
        assert (group, device, async_ops) == ("group", None, True)
        return nullcontext("handle")

    with item.function(original, "group", async_ops=is_overlapped) as handle:
        assert handle == ("handle" if is_overlapped else None)


@pytest.mark.parametrize(
    ("backend", "has_gpu", "expected"),
    [("gloo", True, True), ("gloo", False, False), ("nccl", True, False)],
)
def test_gloo_on_gpus_is_told_by_backend_and_device(monkeypatch, backend, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert upstream_fixes.is_gloo_on_gpus(Namespace(distributed_backend=backend)) is expected


def arguments(**changes):
    fields = {
        "sft": False,
        "dataloader_inter_document_masking": True,
        "pipeline_model_parallel_size": 2,
        "micro_batch_size": 2,
        "num_experts": None,
        "moe_token_dispatcher_type": "allgather",
        "variable_seq_lengths": False,
    }
    return Namespace(**{**fields, **changes})


def test_packed_microbatches_of_several_sequences_have_variable_length():
    args = arguments()
    upstream_fixes.allow_packed_microbatches(args)
    assert args.variable_seq_lengths is True
    assert args.moe_token_dispatcher_type == "alltoall", "or a dense model is refused"


@pytest.mark.parametrize(
    "changes",
    [
        {"dataloader_inter_document_masking": False},
        {"pipeline_model_parallel_size": 1},
        {"micro_batch_size": 1},
    ],
)
def test_otherwise_lengths_stay_fixed(changes):
    args = arguments(**changes)
    before = Namespace(**vars(args))
    upstream_fixes.allow_packed_microbatches(args)
    assert args == before


def test_dispatcher_of_experts_is_the_users():
    args = arguments(num_experts=4, moe_token_dispatcher_type="flex")
    upstream_fixes.allow_packed_microbatches(args)
    assert args.moe_token_dispatcher_type == "flex"
