"""Attention ops: tensors in, tensors out. No ranks, no plans.

`partial_attention` and `partial_attention_backward` compute over the local keys, `merge_partials_`
joins partial results. `reference` holds their naive twins.
"""

from megatron_splitkv.ops.merge import merge_partials_
from megatron_splitkv.ops.partial_attention import partial_attention, partial_attention_backward

__all__ = ["merge_partials_", "partial_attention", "partial_attention_backward"]
