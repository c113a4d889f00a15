"""`doctor` on this machine, and on machines that lack what this one has."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_splitkv import doctor
from megatron_splitkv.checks import inventory
from megatron_splitkv.mcore import hooks
from megatron_splitkv.ops import work_lists

# The modules that a machine lacks cannot be imported, then the command runs as __main__.
WITHOUT = (
    "import runpy, sys; sys.modules.update(dict.fromkeys({names!r})); "
    "sys.argv = ['doctor', '--json']; runpy.run_module('megatron_splitkv.doctor', "
    "run_name='__main__')"
)


def run_without(*names: str) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, "-c", WITHOUT.format(names=names)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert report["is_ok"] == (run.returncode == 0)
    return run.returncode, {finding["name"]: finding for finding in report["findings"]}


def test_this_machine_is_sound():
    code, found = run_without()
    assert code == 0
    assert re.match(r"(\d+) of \1 names", found["hooks"]["found"])
    isa, _, isas = found["CPU kernels"]["found"].partition(";")[0].partition(" of ")
    assert isa in isas.split()
    assert all(finding["state"] != "broken" for finding in found.values())


def test_gpus_are_named_with_the_kernels_that_they_get(monkeypatch):
    properties = SimpleNamespace(
        name="H200", total_memory=140 << 30, multi_processor_count=132, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    capabilities = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (7, 5)}
    monkeypatch.setattr(work_lists, "device_capability", capabilities.__getitem__)
    first, kernels, second = inventory._gpus()
    assert (first.state, kernels.state, second.state) == ("ok", "ok", "broken")
    assert first.found == "H200, 140 GiB, 132 SMs, capability 9.0"
    assert kernels.found.startswith("sm90; bfloat16, float16; head dims (qk, v) (64, 64), ")
    assert "compute capability 8.0" in second.remedy


def test_without_native_modules_it_says_how_to_build():
    code, found = run_without("megatron_splitkv._kernels", "megatron_splitkv._planner")
    assert code == 1
    for name in ("_kernels", "_planner"):
        assert found[name]["state"] == "broken"
        assert "pip install ." in found[name]["remedy"]


def test_without_torch_it_still_reports():
    code, found = run_without("torch")
    assert code == 1
    assert "pip install 'torch>=2.11'" in found["torch"]["remedy"]
    assert found["_planner"]["state"] == "ok"  # planning needs none


def test_a_megatron_that_does_not_import_is_named():
    code, found = run_without("megatron.core")
    assert code == 1
    assert found["megatron-core"]["state"] == "broken"


def test_without_megatron_nothing_is_broken(monkeypatch):
    def absent(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    (finding,) = doctor.inspect_megatron()
    assert (finding.state, finding.found) == ("absent", "not installed")
    assert "pip install megatron-core==0.19.2" in finding.remedy


def test_another_megatron_is_refused(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "0.20.0")
    finding = next(iter(doctor.inspect_megatron()))
    assert finding.state == "broken"
    assert "tested is 0.19.2" in finding.found


def test_a_hook_that_does_not_fit_is_named(monkeypatch):
    def changed(tensor, shifts, dims):  # no cp_group
        return tensor

    monkeypatch.setattr("megatron.core.transformer.multi_token_prediction.roll_tensor", changed)
    broken = [finding for finding in doctor.inspect_megatron() if finding.state == "broken"]
    assert [finding.name for finding in broken] == ["roll_tensor", "hooks"]
    assert "takes (tensor, shifts, dims), needed is (tensor, shifts" in broken[0].found
    fitting, all_hooks = map(int, re.match(r"(\d+) of (\d+)", broken[1].found).groups())
    assert fitting == all_hooks - 1


def test_asking_about_a_hook_changes_nothing():
    import megatron.core.transformer.multi_token_prediction as module

    before = module.roll_tensor
    item = hooks.Replacement(
        target=f"{module.__name__}:roll_tensor", function=print, signature=("tensor",)
    )
    assert "takes (tensor, shifts" in hooks.fault_of(item)
    assert module.roll_tensor is before


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        (set(), "not installed, and not needed"),
        ({"apex"}, "the PyPI package of that name, which is something else"),
        ({"apex", "amp_C"}, "NVIDIA apex"),
    ],
)
def test_which_apex(monkeypatch, installed, text):
    finder = SimpleNamespace(util=SimpleNamespace(find_spec=lambda n: n in installed or None))
    monkeypatch.setattr(inventory, "importlib", finder)
    assert text in inventory.which_apex()


def test_a_probe_that_raises_is_a_finding(monkeypatch):
    def _broken():
        raise OSError("libcudart.so.13: cannot open shared object file")
        yield

    monkeypatch.setattr(inventory, "_kernels", _broken)
    found = [finding for finding in inventory.take_inventory() if finding.state == "broken"]
    assert [finding.topic for finding in found] == ["broken"]
    assert "libcudart" in found[0].found


@pytest.mark.parametrize("has_rich", [True, False])
def test_text_report_names_the_remedy(monkeypatch, capsys, has_rich):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    finding = inventory.Finding(
        topic="t", name="n", state="broken", found="[none]", remedy="pip install 'x[te]'"
    )
    doctor.print_findings([finding])
    printed = capsys.readouterr().out
    for part in ("n", "broken", "[none]", "pip install 'x[te]'"):
        assert part in printed
