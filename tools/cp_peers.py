"""TransformerEngine's context parallelism in the same benchmark, where it is installed.

What a Megatron user has today: `te-p2p` (ring), `te-all-gather` and `te-a2a` (Ulysses), zig-zag by
document, on cuDNN or whatever backend TE chooses. It needs a GPU for each rank, so it runs among
processes and never in replay. Its bytes and its kernels are not visible from here.

Documents are lengthened to multiples of `2 * cp`, as its users pad them; pads count as tokens of
their document, so that TE need not skip them.

Few rows against a long context have no causal mask in TE under context parallelism. There every
row sees all keys: `rows / (2 * keys)` more pairs than are asked for, 0.8 % for 8192 rows of 512K.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from cp_methods import SMALL_ROWS, Gradients, Method, RankInputs, RankPart
from cp_workloads import Workload, zigzag_rows, zigzag_tokens
from torch import Tensor

from megatron_splitkv.comm import Transport
from megatron_splitkv.plan import Causal, Suffix


def missing() -> str | None:
    """What TransformerEngine lacks here, or None."""
    if find_spec("transformer_engine") is None:
        return "transformer-engine is not installed"
    if not (dist.is_initialized() and dist.get_backend() == "nccl"):
        return "needs a GPU for each rank, and NCCL"
    return None


class TransformerEngine(Method):
    """One of TE's `cp_comm_type`s; see the module."""

    comm_type: str
    is_ours = False

    @classmethod
    def refusal(cls, workload: Workload, cp_size: int) -> str | None:
        if (reason := missing()) is not None:
            return reason
        is_rows = isinstance(workload.queries, Suffix)
        if is_rows and len(workload.doc_lens) > 1:
            return "not few rows of several documents"
        if not is_rows and not isinstance(workload.queries, Causal):
            return f"not timed with the mask {workload.queries}"
        return None

    @classmethod
    def small(cls, workload: Workload, cp_size: int) -> Workload:
        small, unit = super().small(workload, cp_size), 2 * cp_size
        lens = small.doc_lens if len(workload.doc_lens) > 1 else (sum(small.doc_lens),)
        queries = small.queries
        if isinstance(queries, Suffix):
            queries = Suffix(unit * (SMALL_ROWS // unit))
        return replace(small, doc_lens=_lengthened(lens, cp_size), queries=queries)

    @classmethod
    def mask(cls, workload: Workload) -> Tensor:
        mask = super().mask(workload)
        return torch.ones_like(mask) if isinstance(workload.queries, Suffix) else mask

    def place(self) -> None:
        lens = _lengthened(self.workload.doc_lens, self.cp_size)
        self.workload = replace(self.workload, doc_lens=lens)
        self.tokens = zigzag_tokens(lens, self.cp_size)
        self.rows = zigzag_rows(self.workload, self.cp_size)

    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        return _TransformerEnginePart(self.workload, self.comm_type, device)


class TransformerEngineP2P(TransformerEngine):
    """Keys and values go round a ring."""

    name = "te-p2p"
    comm_type = "p2p"


class TransformerEngineAllGather(TransformerEngine):
    """All keys and values on every rank."""

    name = "te-all-gather"
    comm_type = "all_gather"


class TransformerEngineA2A(TransformerEngine):
    """Tokens are swapped for heads."""

    name = "te-a2a"
    comm_type = "a2a"


PEERS: dict[str, type[Method]] = {
    method.name: method
    for method in (TransformerEngineP2P, TransformerEngineAllGather, TransformerEngineA2A)
}


def _lengthened(doc_lens: tuple[int, ...], cp_size: int) -> tuple[int, ...]:
    unit = 2 * cp_size
    return tuple(-(-length // unit) * unit for length in doc_lens)


class _TransformerEnginePart(RankPart):
    """Attention among all processes."""

    def __init__(self, workload: Workload, comm_type: str, device: torch.device) -> None:
        from transformer_engine.pytorch import (  # pyright: ignore[reportMissingImports]
            DotProductAttention,
        )

        is_packed = len(workload.doc_lens) > 1
        is_rows = isinstance(workload.queries, Suffix)
        self.attention: Any = DotProductAttention(
            workload.heads[0],
            workload.head_dim,
            num_gqa_groups=workload.heads[1],
            qkv_format="thd" if is_packed else "bshd",
            attn_mask_type="no_mask" if is_rows else "padding_causal" if is_packed else "causal",
        ).to(device)
        group = dist.group.WORLD
        self.attention.set_context_parallel_group(
            group, dist.get_process_group_ranks(group), torch.cuda.Stream(device), comm_type
        )
        self.documents: dict[str, Tensor | int | bool] = {}
        if is_packed:
            self.documents["pad_between_seqs"] = False
            bounds = torch.tensor([0, *workload.doc_lens]).cumsum(0).to(device, torch.int32)
            for side in ("q", "kv"):
                self.documents |= {
                    f"cu_seqlens_{side}": bounds,
                    f"cu_seqlens_{side}_padded": bounds,
                    f"max_seqlen_{side}": max(workload.doc_lens),
                }
        self.shaped: Callable[[Tensor], Tensor] = (
            (lambda x: x) if is_packed else (lambda x: x[None])
        )

    def forward(self, inputs: RankInputs) -> Tensor:
        self.leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        q, k, v = (self.shaped(x) for x in self.leaves)
        self.out = self.attention(q, k, v, **self.documents).view(inputs.q.shape)
        return self.out.detach()

    def backward(self, dout: Tensor) -> Gradients:
        dq, dk, dv = torch.autograd.grad(self.out, self.leaves, dout)
        del self.out, self.leaves
        return dq, dk, dv
