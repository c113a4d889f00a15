"""Putting `SplitKVAttention` into Megatron's layer specs."""

import copy
from dataclasses import fields, is_dataclass

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_splitkv.mcore.module import SplitKVAttention
from megatron_splitkv.mcore.plans import PlanBook


def apply_to_spec[T](spec: T, book: PlanBook) -> T:
    """A copy of a layer or block spec whose self-attention runs Split-KV.

    Args:
        spec: a `ModuleSpec`, block submodules, or anything that holds them; every
            `core_attention` inside is replaced, also those of multi-token prediction.
        book: the model's plans, the same that shard its batches.
    Returns:
        The copy; `spec` itself is untouched.
    Raises:
        ValueError: the spec has no core attention.
    """
    attention = SplitKVAttention.with_book(book)
    changed = copy.deepcopy(spec)
    if _replace_in(changed, attention) == 0:
        raise ValueError(
            f"{type(spec).__name__} holds no core_attention to replace; pass the transformer layer "
            "or block spec, as from get_gpt_layer_local_spec"
        )
    return changed


def _replace_in(node: object, attention: type[SplitKVAttention]) -> int:
    """Replaces in place; returns how many core attentions there were."""
    if isinstance(node, list | tuple):
        return sum(_replace_in(item, attention) for item in node)
    if isinstance(node, dict):
        return sum(_replace_in(item, attention) for item in node.values())
    if isinstance(node, ModuleSpec):
        return _replace_in(node.submodules, attention) + _replace_in(node.params, attention)
    if not is_dataclass(node) or isinstance(node, type):
        return 0
    count = 0
    for item in fields(node):
        if item.name == "core_attention":
            node.core_attention = attention
            count += 1
        else:
            count += _replace_in(getattr(node, item.name), attention)
    return count
