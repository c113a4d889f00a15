"""Replacing names: checks before, counts during, originals after. What a rank must have called."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import hook_table, hooks
from megatron_splitkv.mcore.hooks import Replacement

HOME, BORROWER, BYSTANDER = "megatron.hooks_home", "megatron.hooks_borrower", "other.hooks_module"


class Provider:
    def attention(self):
        return "stock"


def scale(x, factor=2):
    return x * factor


@pytest.fixture
def modules(monkeypatch):
    """A module of Megatron that defines `scale`, one that imported it, and one of somebody else."""
    made = {}
    for name in (HOME, BORROWER, BYSTANDER):
        made[name] = ModuleType(name)
        made[name].scale = scale
        monkeypatch.setitem(sys.modules, name, made[name])
    made[HOME].Provider = Provider
    return made


def replacement(**changes):
    fields = {"target": f"{HOME}:scale", "function": lambda x, factor=2: -x}
    return Replacement(**{**fields, "signature": ("x", "factor"), **changes})


def test_replaces_where_it_is_defined_and_where_megatron_imported_it(modules):
    installed = hooks.install([replacement()])
    assert modules[HOME].scale(3) == modules[BORROWER].scale(3) == -3
    assert modules[BYSTANDER].scale(3) == 6, "a module outside Megatron keeps what it holds"
    installed.uninstall()
    assert modules[HOME].scale is scale
    assert modules[BORROWER].scale is scale
    installed.uninstall()  # a second time does nothing
    assert modules[HOME].scale is scale


def test_replaces_a_method_on_its_class(modules):
    target = f"{HOME}:Provider.attention"
    installed = hooks.install(
        [Replacement(target=target, function=lambda provider: "ours", signature=("self",))]
    )
    assert Provider().attention() == "ours"
    assert installed.calls == {target: 1}
    installed.uninstall()
    assert Provider().attention() == "stock"


def test_counts_the_calls_of_each_name_wherever_it_is_called(modules):
    scaling, method = f"{HOME}:scale", f"{HOME}:Provider.attention"
    installed = hooks.install(
        [
            replacement(),
            Replacement(target=method, function=lambda provider: "ours", signature=("self",)),
        ]
    )
    assert installed.calls == {scaling: 0, method: 0}
    modules[BORROWER].scale(1)
    modules[HOME].scale(1)
    assert installed.calls == {scaling: 2, method: 0}
    installed.uninstall()


def test_wrapping_passes_the_original(modules):
    installed = hooks.install(
        [replacement(function=lambda original, x, factor=2: original(x, factor) + 1, wraps=True)]
    )
    assert modules[HOME].scale(3, factor=5) == 16
    installed.uninstall()


def test_hooks_never_stack(modules):
    wrap = replacement(function=lambda original, x, factor=2: original(x, factor) + 1, wraps=True)
    first, second = hooks.install([wrap]), hooks.install([wrap])
    assert modules[HOME].scale(1) == 3, "one is added once, not twice"
    second.uninstall()
    first.uninstall()
    assert modules[HOME].scale is scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": f"{HOME}:gone"}, r"megatron.hooks_home:gone does not exist"),
        ({"target": "megatron.no_such_module:scale"}, r"cannot be imported"),
        ({"signature": ("x",)}, r"takes \(x, factor\), needed is \(x\)"),
        ({"also": (BORROWER,)}, r"is another object in megatron.hooks_borrower"),
    ],
)
def test_refuses_a_name_that_differs_and_changes_nothing(modules, changes, message):
    def another(x, factor=2):
        return 0

    modules[BORROWER].scale = another
    target = Replacement(
        target=f"{HOME}:Provider.attention", function=lambda self: "ours", signature=("self",)
    )
    with pytest.raises(UnsupportedError, match=message) as caught:
        hooks.install([target, replacement(**changes)])
    assert "install megatron-core 0.19.2" in str(caught.value)
    assert Provider().attention() == "stock"
    assert modules[HOME].scale is scale


def test_patches_restore_what_was_there_and_what_was_not():
    owner = ModuleType("owner")
    owner.present = 1
    patches = hooks.Patches()
    patches.set(owner, "present", 2)
    patches.set(owner, "present", 3)
    patches.set(owner, "absent", 4)
    patches.undo()
    assert owner.present == 1
    assert not hasattr(owner, "absent")


class Layer(torch.nn.Module, BaseTransformerLayer):
    pass


LAYERS, NONE = (torch.nn.ModuleList([Layer()]),), (torch.nn.ModuleList([torch.nn.Identity()]),)
ATTENTION, BATCH = hook_table.ATTENTION, hook_table.BATCH
SLICE, PACKED = hook_table.ROTARY_SLICE, hook_table.ROTARY_PACKED


@pytest.mark.parametrize(
    ("stage", "model", "changes", "expected"),
    [
        (0, LAYERS, {}, {ATTENTION, BATCH, SLICE}),
        (1, LAYERS, {}, {ATTENTION, SLICE}),
        (0, NONE, {}, {BATCH, SLICE}),  # a stage of the embedding alone
        (0, NONE, {"pipeline_model_parallel_size": 1}, {ATTENTION, BATCH, SLICE}),  # own layers
        (0, LAYERS, {"context_parallel_size": 1}, {ATTENTION, BATCH}),
        (0, LAYERS, {"sft": True}, {ATTENTION, BATCH, PACKED}),
        (0, NONE, {"sft": True}, {BATCH}),
        (1, LAYERS, {"sft": True, "no_rope_freq": 2}, {ATTENTION}),
        (2, LAYERS, {"mtp_num_layers": 1}, {ATTENTION, BATCH, SLICE, hook_table.MTP_ROLL}),
    ],
)
def test_expected_calls(monkeypatch, stage, model, changes, expected):
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    fields = {
        "pipeline_model_parallel_size": 3,
        "context_parallel_size": 2,
        "position_embedding_type": "rope",
        "sft": False,
        "dataloader_inter_document_masking": False,
        "no_rope_freq": None,
        "mtp_num_layers": None,
    }
    found = hook_table.expected_calls(Namespace(**{**fields, **changes}), model)
    assert set(found) == expected
