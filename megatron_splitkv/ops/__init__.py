"""Attention ops: tensors in, tensors out. No ranks, no plans.

`partial_attention` and `partial_attention_backward` compute over the local keys; `merge_partials_`
joins partial outputs by their lse, `add_partials_` sums partial gradients, `encode_partials_` makes
either small enough to travel, `pack_rows_` puts rows side by side; `attention_delta` prepares the
backward. On CUDA the first two run on `WorkLists`. `reference` holds naive twins.
"""

from megatron_splitkv.ops.add import add_partials_
from megatron_splitkv.ops.delta import attention_delta
from megatron_splitkv.ops.encode import encode_partials_
from megatron_splitkv.ops.merge import merge_partials_
from megatron_splitkv.ops.pack import pack_rows_
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward
from megatron_splitkv.ops.work_lists import WorkLists

__all__ = [
    "WorkLists",
    "add_partials_",
    "attention_delta",
    "encode_partials_",
    "merge_partials_",
    "pack_rows_",
    "partial_attention",
    "partial_attention_backward",
]
