"""From what Megatron knows of a microbatch to the plan and layout that all its layers share.

Plans are pure functions of document lengths, so every pipeline stage derives its own. A
`PlanBook` only remembers them: forgetting an entry changes no result, microbatches may interleave
in any order, and each model may have a book of its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_splitkv.attention import SplitKVContext
from megatron_splitkv.comm import (
    ProcessGroup,
    ProcessGroupTransport,
    Transport,
    check_same_plan,
)
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Plan, Queries, make_plan

MAX_PLANS = 64  # small; a data set without packing needs one for each batch size
MAX_CONTEXTS = 32  # each holds index tensors of its microbatch; more are seldom in flight


class PlanBook:
    """Plans and contexts of one model, made on demand and remembered.

    Args:
        config: settings of the run.
        queries: the mask that placement balances; a model that mixes window and full layers
            balances the full ones.
    """

    def __init__(self, config: SplitKVConfig | None = None, queries: Queries | None = None) -> None:
        self.config = config or SplitKVConfig()
        self.queries = queries or Causal()
        self._plans = _Memo[Plan](MAX_PLANS)
        self._contexts = _Memo[SplitKVContext](MAX_CONTEXTS)
        self._by_tensor: MutableMapping[Tensor, dict[Hashable, Plan]] = WeakIdKeyDictionary()
        self._checked_groups: set[ProcessGroup] = set()

    def packed(self, cu_seqlens: Tensor, cp_group: ProcessGroup) -> Plan:
        """The plan of a packed microbatch.

        Args:
            cu_seqlens: int32, any shape, ascending from 0: document ends of the whole pack, pads
                included. Layers that pass the same tensor (or a view of it) copy it to the host
                once.
            cp_group: the context-parallel group; all its ranks call this together.
        Raises:
            ValueError: the ranks were fed different documents, or `cu_seqlens` is no such list.
        """
        base = cu_seqlens if cu_seqlens._base is None else cu_seqlens._base
        remembered = self._by_tensor.get(base, {})
        window = _window(cu_seqlens)
        if window in remembered:
            return remembered[window]
        ends = cu_seqlens.flatten().tolist()
        plan = self._plans.get(
            (tuple(ends), cp_group.size()), lambda: self._plan(_lengths(ends), cp_group.size())
        )
        self._check(plan, cp_group, cu_seqlens.device)
        if window is not None:
            self._by_tensor[base] = remembered | {window: plan}
        return plan

    def unpacked(
        self, seq_len: int, batch_size: int, cp_group: ProcessGroup, device: torch.device
    ) -> Plan:
        """The plan of `batch_size` sequences that are one document each, all placed alike.

        Args:
            seq_len: tokens of a whole sequence.
            batch_size: sequences of the microbatch.
            cp_group: the context-parallel group; all its ranks call this together.
            device: where the group can communicate.
        Raises:
            ValueError: `seq_len` cannot be shared equally, or the ranks disagree.
        """
        cp_size = cp_group.size()
        if seq_len % cp_size:
            raise ValueError(
                f"seq_length={seq_len} must be a multiple of context_parallel_size={cp_size}, "
                "because every rank holds equally many tokens of each sequence; change one of them"
            )
        plan = self._plans.get(
            (seq_len, batch_size, cp_size),
            lambda: self._plan([seq_len], cp_size).repeated(batch_size),
        )
        if cp_group not in self._checked_groups:
            self._check(plan, cp_group, device)
        return plan

    def context(
        self, plan: Plan, cp_group: ProcessGroup, device: torch.device, queries: Queries
    ) -> SplitKVContext:
        """What an attention layer with mask `queries` runs on, with its tensors on `device`."""

        def build() -> SplitKVContext:
            layout = build_layout(
                plan, cp_group.rank(), num_stages=self.config.num_stages, queries=queries
            )
            return SplitKVContext(
                layout=layout.to(device), transport=transport_of(cp_group), config=self.config
            )

        key = (plan, cp_group, device, queries)
        return self._contexts.get(key, build)

    def forget(self) -> None:
        """Drops everything that was remembered, and with it the process groups."""
        self._plans.clear()
        self._contexts.clear()
        self._by_tensor.clear()
        self._checked_groups.clear()

    def _plan(self, doc_lens: list[int], cp_size: int) -> Plan:
        return make_plan(
            doc_lens,
            cp_size,
            queries=self.queries,
            block_size=self.config.block_size,
            tolerance=self.config.balance_tolerance,
        )

    def _check(self, plan: Plan, cp_group: ProcessGroup, device: torch.device) -> None:
        if self.config.check_plan == "first" and cp_group in self._checked_groups:
            return
        transport = transport_of(cp_group)
        if transport is not None:
            check_same_plan(plan.fingerprint, transport, device)
        self._checked_groups.add(cp_group)


class _Memo[T]:
    """The last results of a pure function."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._entries:
            self._entries[key] = build()
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]

    def clear(self) -> None:
        self._entries.clear()


def _window(tensor: Tensor) -> Hashable | None:
    """What of its base a tensor shows, and which version of it; equal for `[n]` and `[1, n]`.

    None for a tensor of inference mode, which does not say when it is written to.
    """
    if tensor.is_inference():
        return None
    dims = tuple(dim for dim in zip(tensor.shape, tensor.stride(), strict=True) if dim[0] != 1)
    return tensor._version, tensor.storage_offset(), dims


def transport_of(cp_group: ProcessGroup) -> Transport | None:
    """The group as a transport; None for a group of one."""
    return ProcessGroupTransport(group=cp_group) if cp_group.size() > 1 else None


def _lengths(ends: list[int]) -> list[int]:
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens={ends[:8]}{'...' if len(ends) > 8 else ''} must start at 0 and never "
            "decrease: the ends of the documents of the whole pack"
        )
    return [end - begin for begin, end in pairwise(ends)]
