"""Exact context parallelism for Megatron-Core: keys and values stay, queries travel.

Names are taken from their rooms on first use, so planning loads no torch and everything but
`mcore` loads no Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_splitkv.attention import SplitKVContext, splitkv_attention
    from megatron_splitkv.config import SplitKVConfig
    from megatron_splitkv.errors import UnsupportedError
    from megatron_splitkv.layout import ShardLayout, build_layout, shard_rows, unshard_rows
    from megatron_splitkv.plan import (
        Anchors,
        Causal,
        Full,
        Machine,
        Plan,
        Prefix,
        Suffix,
        Window,
        choose_route,
        make_plan,
    )

__version__ = "0.1.0"

__all__ = [
    "Anchors",
    "Causal",
    "Full",
    "Machine",
    "Plan",
    "Prefix",
    "ShardLayout",
    "SplitKVConfig",
    "SplitKVContext",
    "Suffix",
    "UnsupportedError",
    "Window",
    "build_layout",
    "choose_route",
    "make_plan",
    "shard_rows",
    "splitkv_attention",
    "unshard_rows",
]

_NAMES_OF_ROOM = {
    "attention": ("SplitKVContext", "splitkv_attention"),
    "config": ("SplitKVConfig",),
    "errors": ("UnsupportedError",),
    "layout": ("ShardLayout", "build_layout", "shard_rows", "unshard_rows"),
    "plan": (
        "Anchors",
        "Causal",
        "Full",
        "Machine",
        "Plan",
        "Prefix",
        "Suffix",
        "Window",
        "choose_route",
        "make_plan",
    ),
}
_ROOM_OF_NAME = {name: room for room, names in _NAMES_OF_ROOM.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _ROOM_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
