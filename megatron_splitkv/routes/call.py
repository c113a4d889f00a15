"""What an attention call is made of, whatever travels in it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_splitkv.comm import Transport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import KeyIntervals, ShardLayout
from megatron_splitkv.ops.work_lists import WorkLists
from megatron_splitkv.wire import PartialFormat

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKVContext:
    """What the attention calls of one microbatch run on besides their tensors.

    Attributes:
        layout: this rank's part of the plan, on the device of the tensors.
        transport: the context-parallel group; None only where `layout.cp_size` is 1.
        config: settings of the run.
    """

    layout: ShardLayout
    transport: Transport | None
    config: SplitKVConfig = field(default_factory=SplitKVConfig)
    _work: dict[KeyIntervals, WorkLists] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        layout, group = self.layout, self.transport
        size, rank = (1, 0) if group is None else (group.size, group.rank)
        if (size, rank) != (layout.cp_size, layout.cp_rank):
            got = "no transport" if group is None else f"rank {rank} of a group of {size}"
            raise ValueError(
                f"layout is for rank {layout.cp_rank} of cp_size={layout.cp_size}, but got {got}; "
                "pass the transport of the context-parallel group that the plan was made for"
            )

    def work_on(self, seen: KeyIntervals) -> WorkLists:
        """What the kernels do for these intervals, worked out once for all layers."""
        work = self._work.get(seen)
        if work is None:
            work = self._work[seen] = WorkLists(
                seen.begin_on_host,
                seen.end_on_host,
                is_deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        return work


class Call(NamedTuple):
    """One attention call beside its tensors.

    Attributes:
        context: what the calls of a microbatch share.
        softmax_scale: factor of the logits.
        keeps_gathered: what the forward pass gathers is kept for the backward pass.
    """

    context: SplitKVContext
    softmax_scale: float
    keeps_gathered: bool

    @property
    def layout(self) -> ShardLayout:
        return self.context.layout

    def partial_format(
        self, dtype: torch.dtype, num_heads: int, *dims: int, has_lse: bool
    ) -> PartialFormat:
        """The wire row of partials `[R, num_heads, dim]`, for inputs of `dtype`."""
        partial_dtype = self.context.config.resolved_partial_dtype(DTYPE_NAMES[dtype])
        return PartialFormat(
            partial_dtype=partial_dtype, num_heads=num_heads, dims=dims, has_lse=has_lse
        )


class KeysValues(NamedTuple):
    """One set of KV rows, `[rows, Hkv, D]` and `[rows, Hkv, Dv]`, or their gradients."""

    k: Tensor
    v: Tensor

    def empty_gradients(self, *, num_calls: int) -> "KeysValues":
        """What so many calls write: summed in fp32, or rounded by the only one."""
        dtype = torch.float32 if num_calls > 1 else self.k.dtype
        return KeysValues(*(torch.empty_like(x, dtype=dtype) for x in self))

    def to(self, dtype: torch.dtype) -> "KeysValues":
        return KeysValues(self.k.to(dtype), self.v.to(dtype))


def paired(k: Tensor | None, v: Tensor | None) -> KeysValues | None:
    """Both or none."""
    return None if k is None or v is None else KeysValues(k, v)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRows:
    """Query rows as the partial backward needs them: `[R, Hq, *]`, lse and delta merged."""

    dout: Tensor
    q: Tensor
    lse: Tensor
    delta: Tensor
