"""Replaces functions of Megatron by name, with checks: each exists, fits, and its calls count.

A fault in this layer is silent by nature: a wrong rotary slice moves a loss in its sixth digit. So
nothing here is best effort. A name that is missing or whose parameters differ is an error before
anything is replaced, every replacement counts its calls, and all of it can be undone.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_splitkv.errors import UnsupportedError

_ORIGINAL = "__splitkv_original__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One name of Megatron and what stands there instead.

    Attributes:
        target: "package.module:name" or "package.module:Class.method".
        function: called instead of the original, with the same arguments; a class is put there as
            it is, and its calls are not counted.
        also: modules that hold the same object under the same name because they imported it; they
            are imported first and must hold it. Any other loaded `megatron.*` module that holds it
            is rebound as well.
        signature: names of the parameters that the original must have, in order; None skips the
            check (classes).
        wraps: pass the original as the first argument of `function`.
    """

    target: str
    function: Callable[..., Any]
    also: tuple[str, ...] = ()
    signature: tuple[str, ...] | None
    wraps: bool = False


@dataclass(slots=True)
class Patches:
    """Attributes that were set, and what they held before."""

    _undo: list[tuple[object, str, Any, bool]] = field(default_factory=list)

    def set(self, owner: object, name: str, value: object) -> None:
        """Sets `owner.name` and remembers what `owner` itself held under that name."""
        own = vars(owner)
        self._undo.append((owner, name, own.get(name), name in own))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restores every attribute, last set first; calling it again does nothing."""
        while self._undo:
            owner, name, value, was_there = self._undo.pop()
            if was_there:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


class Installation:
    """A set of replacements in force, their call counts, and the way back."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._calls: dict[str, int] = {}

    @property
    def calls(self) -> dict[str, int]:
        """Number of calls of each counted replacement, by target."""
        return dict(self._calls)

    def uninstall(self) -> None:
        """Puts every original back; calling it again does nothing."""
        self._patches.undo()

    def bind(self, found: "_Found") -> None:
        item = found.replacement
        value: object = item.function
        if not isinstance(item.function, type):
            self._calls[item.target] = 0
            value = self._counted(item, found.original)
        for owner in (found.owner, *_other_holders(found)):
            self._patches.set(owner, found.name, value)

    def _counted(self, item: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
        function = functools.partial(item.function, original) if item.wraps else item.function

        @functools.wraps(original)
        def hook(*args: object, **kwargs: object) -> object:
            self._calls[item.target] += 1
            return function(*args, **kwargs)

        setattr(hook, _ORIGINAL, original)
        return hook


def install(replacements: Sequence[Replacement]) -> Installation:
    """Checks all replacements, then puts them in force.

    Args:
        replacements: what to replace. A target that a former call replaced is replaced afresh:
            hooks never stack.
    Returns:
        The installation: call counts and `uninstall`.
    Raises:
        UnsupportedError: a target does not exist, has other parameters than expected, or is not
            the object that a module in `also` holds. Nothing was replaced then.
    """
    found = [_find(item) for item in replacements]
    installation = Installation()
    for item in found:
        installation.bind(item)
    return installation


def is_replaced(owner: object, name: str) -> bool:
    """Whether `owner.name` is a hook of ours."""
    return hasattr(getattr(owner, name), _ORIGINAL)


def fault_of(replacement: Replacement) -> str | None:
    """Why `install` would refuse a replacement; None if it would not. Changes nothing."""
    try:
        _find(replacement)
    except UnsupportedError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    replacement: Replacement
    owner: object
    name: str
    current: object
    original: Callable[..., Any]


def _find(item: Replacement) -> _Found:
    module_name, _, path = item.target.partition(":")
    *parents, name = path.split(".")
    owner: object = _import(module_name, item.target)
    for parent in parents:
        owner = _attribute(owner, parent, item.target)
    current = _attribute(owner, name, item.target)
    original: Any = getattr(current, _ORIGINAL, current)
    if item.signature is not None:
        names = tuple(inspect.signature(original).parameters)
        if names != item.signature:
            raise _differs(item.target, f"takes ({', '.join(names)})", _expected(item))
    for other in item.also:
        held = _attribute(_import(other, item.target), name, item.target)
        if held is not current:
            raise _differs(item.target, f"is another object in {other}", "one object in both")
    return _Found(replacement=item, owner=owner, name=name, current=current, original=original)


def _other_holders(found: _Found) -> list[ModuleType]:
    """Loaded modules of Megatron that imported the original by name."""
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("megatron.")
        and module is not found.owner
        and isinstance(module, ModuleType)
        and vars(module).get(found.name) is found.current
    ]


def _import(module_name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _differs(target, f"cannot be imported ({error})", f"module {module_name}") from error


def _attribute(owner: object, name: str, target: str) -> object:
    if not hasattr(owner, name):
        raise _differs(target, "does not exist", f"{name} in {getattr(owner, '__name__', owner)}")
    return getattr(owner, name)


def _expected(item: Replacement) -> str:
    return f"({', '.join(item.signature or ())})"


def _differs(target: str, got: str, needed: str) -> UnsupportedError:
    from importlib.metadata import version

    return UnsupportedError(
        f"megatron-core {version('megatron-core')}: {target} {got}, needed is {needed}; install "
        "megatron-core 0.19.2, or run with --context-parallel-impl megatron"
    )
