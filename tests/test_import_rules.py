"""Imports point one way. Read from the syntax tree, so imports inside functions count too."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_splitkv

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_splitkv"

# What each room may import besides itself. A new room is entered here, or its files fail.
_BELOW_COMM = {"errors", "config", "plan", "layout"}
_BELOW_MCORE = _BELOW_COMM | {"comm", "ops", "wire", "attention"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "plan": {"errors", "config", "_planner"},
    "layout": {"errors", "config", "plan", "_planner"},
    "comm": _BELOW_COMM | {"ops"},
    "ops": {"errors", "config", "_kernels"},
    "wire": {"config", "comm", "ops"},
    "routes": _BELOW_COMM | {"comm", "ops", "wire"},
    "attention": {"layout", "ops", "routes"},
    # What `verify` and `doctor` look at: all of the product but Megatron, which mcore checks.
    "checks": {*_BELOW_MCORE, "_kernels"},
    "mcore": {*_BELOW_MCORE, "checks"},
    "launch": {"errors", "mcore"},
    "verify": {"errors", "config", "comm", "checks", "mcore"},
    "doctor": {"checks", "mcore"},
}
# Rooms that load without torch; all but mcore and launch load without Megatron.
TORCHLESS_ROOMS = {"errors", "config", "plan", "doctor"}
MEGATRON_ROOMS = {"mcore", "launch"}
# Megatron takes process groups, so the files that start a job or stand in for a GPU make them.
DISTRIBUTED_FILES = {
    "comm/__init__.py",
    "comm/process_group.py",
    "comm/symmetric.py",
    "checks/processes.py",
    "mcore/cpu_mode.py",
    "mcore/launch.py",
}


def room_of(file: str) -> str:
    """Room of a file named relative to the package: `plan/queries.py` -> `plan`; root -> empty."""
    return file.partition("/")[0].removesuffix(".py").removesuffix("__init__")


def named_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields `(line, dotted name)` of whatever the file imports or reaches by attribute.

    `from a import b` gives `a` and `a.b` (b may be a module). A relative import starts with a dot.
    `x.distributed` gives `torch.distributed`, whatever name torch goes by.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def is_in(name: str, module: str) -> bool:
    """Whether `name` is `module` or lies below it."""
    return name == module or name.startswith(f"{module}.")


def fault(file: str, name: str) -> str | None:
    """Says what is wrong with `file` naming the module `name`; None if nothing is."""
    room = room_of(file)
    if name.startswith("."):
        return f"relative import {name}"
    if is_in(name, "torch.distributed") and file not in DISTRIBUTED_FILES:
        return "only comm names torch.distributed"
    if is_in(name, "torch") and room in TORCHLESS_ROOMS:
        return f"{room} must load without torch"
    if is_in(name, "megatron") and room not in MEGATRON_ROOMS:
        return f"only mcore names megatron, not {name}"
    if not is_in(name, "megatron_splitkv"):
        return None
    target = name.split(".")[1] if "." in name else ""
    if not target:
        return "imports from the package root"
    if room and target != room and target not in ROOMS[room]:
        return f"{room} must not import {target}"
    return None


def faults(file: str, source: str) -> list[str]:
    """Every broken import rule in one file, named relative to the package."""
    if room_of(file) not in {*ROOMS, ""}:
        return [f"{file}: unknown room; enter it in ROOMS with what it may import"]
    named = sorted(set(named_modules(ast.parse(source))))
    found = [(line, fault(file, name)) for line, name in named]
    return [f"{file}:{line}: {text}" for line, text in found if text]


PACKAGE_FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", PACKAGE_FILES)
def test_file_imports_only_what_its_room_may(file: str) -> None:
    assert faults(file, (PACKAGE / file).read_text()) == []


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("config.py", "import megatron_splitkv.plan.queries", "config must not import plan"),
        ("plan/a.py", "from megatron_splitkv.layout import b", "plan must not import layout"),
        ("layout/a.py", "import megatron_splitkv.comm", "layout must not import comm"),
        ("ops/a.py", "from megatron_splitkv.plan import Plan", "ops must not import plan"),
        ("ops/a.py", "import megatron_splitkv.comm", "ops must not import comm"),
        ("attention.py", "import megatron_splitkv.mcore", "attention must not import mcore"),
        ("comm/rows.py", "import megatron_splitkv._kernels", "comm must not import _kernels"),
        ("plan/a.py", "import torch", "plan must load without torch"),
        ("plan/a.py", "def f():\n    from torch import Tensor", "plan must load without torch"),
        ("config.py", "if TYPE_CHECKING:\n    import torch", "config must load without torch"),
        ("ops/a.py", "import torch.distributed as dist", "only comm names torch.distributed"),
        ("ops/a.py", "from torch import distributed", "only comm names torch.distributed"),
        ("ops/a.py", "import torch as t\nt.distributed.barrier()", "only comm names"),
        ("mcore/spec.py", "import torch.distributed", "only comm names torch.distributed"),
        ("layout/a.py", "import_module('torch.distributed')", "only comm names"),
        ("attention.py", "from megatron.core import parallel_state", "only mcore names megatron"),
        ("__init__.py", "import megatron.core", "only mcore names megatron"),
        ("ops/a.py", "from megatron_splitkv import plan", "imports from the package root"),
        ("mcore/a.py", "import megatron_splitkv", "imports from the package root"),
        ("plan/a.py", "from . import queries", "relative import ."),
        ("plan/a.py", "from ..config import SplitKVConfig", "relative import ..config"),
        (
            "checks/a.py",
            "from megatron_splitkv.mcore import parity",
            "checks must not import mcore",
        ),
        ("checks/a.py", "import megatron.core", "only mcore names megatron"),
        ("attention.py", "import megatron_splitkv.checks", "attention must not import checks"),
        ("verify.py", "import torch.distributed", "only comm names torch.distributed"),
        ("extra/a.py", "import os", "unknown room"),
    ],
)
def test_a_broken_rule_is_found(file: str, source: str, message: str) -> None:
    assert any(message in text for text in faults(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("plan/a.py", "import numpy\nimport megatron_splitkv._planner as _planner"),
        ("plan/a.py", "from megatron_splitkv.plan.queries import Causal"),
        ("comm/process_group.py", "import torch.distributed as dist"),
        ("mcore/launch.py", "import torch\ntorch.distributed.init_process_group()"),
        ("mcore/spec.py", "from megatron.core import parallel_state"),
        ("launch.py", "from megatron_splitkv.mcore.launch import main"),
        ("__init__.py", "from megatron_splitkv.errors import UnsupportedError"),
    ],
)
def test_a_kept_rule_is_not_reported(file: str, source: str) -> None:
    assert faults(file, source) == []


def loaded_by(*modules: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter after importing `modules`."""
    code = (
        f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["megatron_splitkv", *(f"megatron_splitkv.{room}" for room in sorted(TORCHLESS_ROOMS))],
)
def test_loads_without_torch_and_megatron(module: str) -> None:
    assert not loaded_by(module) & {"torch", "megatron"}


def test_all_but_mcore_load_without_megatron() -> None:
    rooms = sorted({room_of(file) for file in PACKAGE_FILES} - MEGATRON_ROOMS - {""})
    loaded = loaded_by(*(f"megatron_splitkv.{room}" for room in rooms))
    assert "megatron_splitkv" in loaded
    assert "megatron" not in loaded


@pytest.mark.parametrize("name", megatron_splitkv.__all__)
def test_root_name_resolves(name: str) -> None:
    assert getattr(megatron_splitkv, name).__name__ == name


def test_root_refuses_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'megatron_splitkv' has no attribute 'nope'"):
        _ = megatron_splitkv.nope
