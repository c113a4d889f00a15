"""Split-KV in a script of one's own, for what no argument of Megatron's reaches.

`apply_to_spec`, `shard_batch` and `wrap_rotary` replace nothing and are enough for sequences of one
document. Packed documents and multi-token prediction go through functions that Megatron calls by
name, so those are put under a book's plans here, for the whole process.
"""

from megatron_splitkv.mcore import hooks
from megatron_splitkv.mcore.hook_table import order_replacements
from megatron_splitkv.mcore.plans import PlanBook


def follow_plans(book: PlanBook) -> hooks.Installation:
    """Makes Megatron's batch slicing, rotary slicing and MTP roll follow the plans of a book.

    Call it before the model is built, instead of `wrap_rotary`; every model of the process that
    calls those functions is then taken to follow `book`.

    Args:
        book: the model's plans, also given to `apply_to_spec`.
    Returns:
        The installation; its `uninstall()` puts Megatron's functions back.
    Raises:
        UnsupportedError: a function of this Megatron differs from the one we know.
    """
    return hooks.install(order_replacements(lambda: book))
