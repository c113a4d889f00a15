"""From what Megatron knows of a microbatch to the plan and layout that all its layers share.

Plans are pure functions of document lengths, so every pipeline stage derives its own. A
`PlanBook` only remembers them: forgetting an entry changes no result, microbatches may interleave
in any order, and each model may have a book of its own.
"""

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_splitkv.attention import SplitKVContext
from megatron_splitkv.comm import (
    HostStagedTransport,
    ProcessGroup,
    SymmetricTransport,
    Transport,
    check_same_plan,
    transport_of,
)
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import Causal, Plan, PlanCache, Planner, Queries, Timing, check_route

MAX_PLAN_BYTES = 16 << 20  # packed plans also live by their tensor


class PlanBook:
    """Plans and contexts of one model, made on demand and remembered.

    Args:
        config: settings of the run.
        queries: the mask that placement balances; a model that mixes window and full layers
            balances the full ones.
        timing: where it is given, each plan takes the tolerance of the least predicted time.
    Raises:
        ValueError: the mask has not the route of the config.
    """

    def __init__(
        self,
        config: SplitKVConfig | None = None,
        queries: Queries | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.config = config or SplitKVConfig()
        self.queries = queries or Causal()
        self.timing = timing
        check_route(self.config.route, self.queries)
        self._plans = PlanCache(MAX_PLAN_BYTES)
        self._by_tensor: MutableMapping[Tensor, _TensorPlans] = WeakIdKeyDictionary()
        # Index tensors on the device: they go with the last user of their plan.
        self._contexts: WeakKeyDictionary[Plan, dict[Hashable, SplitKVContext]] = (
            WeakKeyDictionary()
        )
        self._checked_groups: set[ProcessGroup] = set()
        self._transports: dict[tuple[ProcessGroup, torch.device], Transport | None] = {}

    def planner(self, cp_size: int) -> Planner:
        """What makes this book's plans; a data loader's worker can call a pickled one."""
        return Planner(
            cp_size=cp_size, config=self.config, queries=self.queries, timing=self.timing
        )

    def remember(self, plan: Plan) -> None:
        """Takes the plan of a packed microbatch that this book's planner made elsewhere.

        `packed` then finds it by the documents and need not make it. Ranks that were given none,
        such as those that Megatron broadcasts the batch to, make the same one themselves.

        A plan does not say by which tolerance, speeds, nodes or calibration it was made: others
        than this book's are found where ranks compare their plans (`check_plan`).

        Raises:
            ValueError: the plan has another mask, route or block size than this book's, or knows
                pads apart from documents.
        """
        way_out = "make it with PlanBook.planner"
        if plan.queries != self.queries:
            raise ValueError(
                f"a plan of {plan.queries} is not of this run, which places {self.queries}; "
                f"{way_out}"
            )
        if plan.route != self.config.route:
            raise ValueError(
                f"a plan with route={plan.route!r} is not of this run, which has "
                f"route={self.config.route!r}; {way_out}"
            )
        if self.config.block_size not in (None, plan.block_size):
            raise ValueError(
                f"a plan with block_size={plan.block_size} is not of this run, which has "
                f"block_size={self.config.block_size}; {way_out}"
            )
        if plan.padded_lens != plan.doc_lens:
            raise ValueError(
                "a plan with padded_lens of its own is not of this run, where pads are part of "
                f"their documents; {way_out}"
            )
        ends = tuple(accumulate(plan.doc_lens, initial=0))
        self._plans.get((ends, plan.cp_size), lambda: plan)

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
        known = self._by_tensor.get(base)
        if known is None or known.version != _version(base):
            known = _TensorPlans(version=_version(base))
        window = (*_window(cu_seqlens), cp_group.size())
        if window in known.plans:
            return known.plans[window]
        ends = cu_seqlens.flatten().tolist()
        plan, _ = self._plans.get(
            (tuple(ends), cp_group.size()), lambda: self.planner(cp_group.size())(_lengths(ends))
        )
        self._check(plan, cp_group, cu_seqlens.device)
        if known.version is not None:
            known.plans[window] = plan
            self._by_tensor[base] = known
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
        plan, is_new = self._plans.get(
            (seq_len, batch_size, cp_size),
            lambda: self.planner(cp_size)([seq_len]).repeated(batch_size),
        )
        if is_new or cp_group not in self._checked_groups:
            self._check(plan, cp_group, device)
        return plan

    def context(
        self, plan: Plan, cp_group: ProcessGroup, device: torch.device, queries: Queries
    ) -> SplitKVContext:
        """What an attention layer with mask `queries` runs on, with its tensors on `device`."""

        contexts = self._contexts.setdefault(plan, {})
        key = (cp_group, device, queries)
        if key not in contexts:
            layout = build_layout(
                plan, cp_group.rank(), num_stages=self.config.num_stages, queries=queries
            )
            contexts[key] = SplitKVContext(
                layout=layout.to(device),
                transport=self.transport(cp_group, device),
                config=self.config,
            )
        return contexts[key]

    def transport(self, cp_group: ProcessGroup, device: torch.device) -> Transport | None:
        """The group as a transport for tensors on `device`; None for a group of one.

        Raises:
            ValueError: the group has not the backend that the configuration asks for.
        """
        key = (cp_group, device)
        if key not in self._transports:
            self._transports[key] = transport_of(cp_group, device, self.config.transport)
        return self._transports[key]

    def transport_name(self, cp_group: ProcessGroup, device: torch.device) -> str:
        """What the rows of a group travel by: "symmetric", "nccl", "gloo"; "none" for one rank."""
        transport = self.transport(cp_group, device)
        if transport is None:
            return "none"
        if isinstance(transport, SymmetricTransport):
            return "symmetric"
        is_gloo = device.type == "cpu" or isinstance(transport, HostStagedTransport)
        return "gloo" if is_gloo else "nccl"

    def forget(self) -> None:
        """Drops everything that was remembered, and with it the process groups."""
        self._plans.clear()
        self._contexts.clear()
        self._by_tensor.clear()
        self._checked_groups.clear()
        self._transports.clear()

    def _check(self, plan: Plan, cp_group: ProcessGroup, device: torch.device) -> None:
        if self.config.check_plan == "first" and cp_group in self._checked_groups:
            return
        transport = self.transport(cp_group, device)
        if transport is not None:
            check_same_plan(plan.fingerprint, transport, device)
        self._checked_groups.add(cp_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorPlans:
    """Plans read from one tensor while it was in one version."""

    version: int | None
    plans: dict[Hashable, Plan] = field(default_factory=dict)


def _version(tensor: Tensor) -> int | None:
    """Count of writes to a tensor; one of inference mode has none, and is never remembered."""
    return None if tensor.is_inference() else tensor._version


def _window(tensor: Tensor) -> tuple[Hashable, ...]:
    """What of its base a tensor shows; equal for `[n]` and `[1, n]`."""
    dims = tuple(dim for dim in zip(tensor.shape, tensor.stride(), strict=True) if dim[0] != 1)
    return tensor.storage_offset(), dims


def _lengths(ends: list[int]) -> list[int]:
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(
            f"cu_seqlens={ends[:8]}{'...' if len(ends) > 8 else ''} must start at 0 and never "
            "decrease: the ends of the documents of the whole pack"
        )
    return [end - begin for begin, end in pairwise(ends)]
