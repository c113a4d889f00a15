"""From a plan to what one rank holds, sends, receives and sees."""

from megatron_splitkv.layout.intervals import KeyIntervals
from megatron_splitkv.layout.key_layout import KeyLayout, Segment
from megatron_splitkv.layout.layout import ExchangeStage, ShardLayout, build_layout
from megatron_splitkv.layout.shard import shard_rows, token_index, unshard_rows

__all__ = [
    "ExchangeStage",
    "KeyIntervals",
    "KeyLayout",
    "Segment",
    "ShardLayout",
    "build_layout",
    "shard_rows",
    "token_index",
    "unshard_rows",
]
