"""Attention ops: tensors in, tensors out. No ranks, no plans.

`partial_attention` and `partial_attention_backward` compute over the local keys, `merge_partials_`
joins partial results, `attention_delta` prepares the backward. On CUDA the first two run on
`WorkLists`. `reference` holds naive twins.
"""

from megatron_splitkv.ops.delta import attention_delta
from megatron_splitkv.ops.merge import merge_partials_
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward
from megatron_splitkv.ops.work_lists import WorkLists

__all__ = [
    "WorkLists",
    "attention_delta",
    "merge_partials_",
    "partial_attention",
    "partial_attention_backward",
]
