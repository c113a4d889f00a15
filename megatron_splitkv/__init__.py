"""Exact context parallelism for Megatron-Core: keys and values stay, queries travel.

Names are taken from their rooms on first use, so planning loads no torch and everything but
`mcore` loads no Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_splitkv.errors import UnsupportedError

__version__ = "0.1.0"

__all__ = ["UnsupportedError"]

_HOMES = {"UnsupportedError": "megatron_splitkv.errors"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
