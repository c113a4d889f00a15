"""One way to share an attention call over ranks, and the product as the first of them.

A rank's part is written once, against `Transport`, and runs on processes, on threads and in replay.
The rivals are in `cp_baselines.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from cp_workloads import Int64Array, Workload
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.checks.limits import DTYPE_NAMES
from megatron_splitkv.checks.oracle import document_mask
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.ops import (
    WorkLists,
    partial_attention,
    partial_attention_backward,
)
from megatron_splitkv.plan import Suffix, make_plan
from megatron_splitkv.plan.route import has_route

Gradients = tuple[Tensor, Tensor, Tensor]
SMALL_LENS = (301, 1, 77, 134)  # divides by nothing
SMALL_ROWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInputs:
    """Tensors of one rank: q and dout `[rows, Hq, D]`, k and v `[tokens, Hkv, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class RankPart(ABC):
    """One rank of a method: `forward`, then `backward` on what it kept."""

    @abstractmethod
    def forward(self, inputs: RankInputs) -> Tensor:
        """Output of the own rows, `[rows, Hq, D]`."""

    @abstractmethod
    def backward(self, dout: Tensor) -> Gradients:
        """dq, dk and dv of the own rows and tokens, in the dtype of the inputs."""


class Method(ABC):
    """A way to share one attention call over `cp_size` ranks.

    Attributes:
        name: for tables.
        is_ours: it runs on our kernels and transports, which can be looked into.
        transport: what moves its rows on real ranks; None takes that of the run.
        rows, tokens: query rows and KV tokens of each rank, ascending.
    """

    name: str
    is_ours: bool = True
    transport: Transport | None = None
    rows: list[Int64Array]
    tokens: list[Int64Array]

    def __init__(self, workload: Workload, cp_size: int, config: SplitKVConfig) -> None:
        self.workload = workload
        self.cp_size = cp_size
        self.config = config
        self.place()

    @abstractmethod
    def place(self) -> None:
        """Sets `rows` and `tokens`."""

    @abstractmethod
    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        """One rank of the method."""

    @classmethod
    def refusal(cls, workload: Workload, cp_size: int) -> str | None:
        """Why the method cannot run, or None."""
        return None

    @classmethod
    def small(cls, workload: Workload, cp_size: int) -> Workload:
        """A problem of the kind, heads and mask of a large one that dense fp64 can work out."""
        queries = workload.queries
        if isinstance(queries, Suffix):
            queries = Suffix(min(queries.num_rows, SMALL_ROWS))
        return replace(workload, doc_lens=SMALL_LENS, queries=queries)

    @classmethod
    def mask(cls, workload: Workload) -> Tensor:
        """What the method computes: which row sees which token, bool `[rows, tokens]`."""
        return document_mask(workload.queries, workload.doc_lens)

    def row_intervals(self) -> Int64Array:
        """Tokens of the pack that each query row sees, `[rows, 2]`."""
        return self.workload.whole().model().row_intervals()

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """How partial sums of a baseline travel: as those of `split-kv`, 16 or 32 bits."""
        partial_dtype = self.config.resolved_partial_dtype(DTYPE_NAMES[dtype])
        return torch.float32 if partial_dtype == "fp32" else dtype


class SplitKV(Method):
    """The product. `route` is what travels: "queries", "keys", or "auto", what Megatron's runs
    take by their heads.
    """

    name = "split-kv"
    route = "auto"
    num_stages: int | None = None  # else as configured

    @classmethod
    def refusal(cls, workload: Workload, cp_size: int) -> str | None:
        if cls.route == "auto" or has_route(cls.route, workload.queries):
            return None
        return f"{cls.route} do not travel with the mask {workload.queries}"

    def place(self) -> None:
        if self.num_stages is not None:
            self.config = replace(self.config, num_stages=self.num_stages)
        config, route = self.config, self.route
        if route == "auto":
            route = self.workload.route(self.cp_size, config.num_stages)
        self.plan = make_plan(
            self.workload.doc_lens,
            self.cp_size,
            queries=self.workload.queries,
            block_size=config.block_size,
            route=route,
            tolerance=config.balance_tolerance,
        )
        self.layouts = [
            build_layout(self.plan, rank, num_stages=config.num_stages)
            for rank in range(self.cp_size)
        ]
        self.tokens = [layout.kv_index.numpy() for layout in self.layouts]
        self.rows = self.tokens
        if not self.plan.is_self_attention:
            starts = np.cumsum([0, *self.plan.query_rows])
            self.rows = [np.arange(a, b) for a, b in pairwise(starts)]

    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        context = SplitKVContext(
            layout=self.layouts[rank].to(device), transport=transport, config=self.config
        )
        return _SplitKVPart(context)


def variant(
    kind: type[Method],
    words: Sequence[str],
    transport: Transport | None,
    num_stages: int | None,
    route: str,
) -> type[Method]:
    """The same method, set apart by words in its name.

    Args:
        transport: as `Method.transport`.
        num_stages, route: of split-kv.
    """
    fields = {
        "name": " ".join([kind.name, *words]), "transport": transport, "num_stages": num_stages,
        "route": route,
    }  # fmt: skip
    return type(kind.__name__, (kind,), fields)


class _SplitKVPart(RankPart):
    def __init__(self, context: SplitKVContext) -> None:
        self.context = context

    def forward(self, inputs: RankInputs) -> Tensor:
        self.leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        q, k, v = self.leaves
        self.out, _ = splitkv_attention(q, k, v, self.context)
        return self.out.detach()

    def backward(self, dout: Tensor) -> Gradients:
        dq, dk, dv = torch.autograd.grad(self.out, self.leaves, dout)
        del self.out, self.leaves
        return dq, dk, dv


class Seen:
    """Which keys of one set of KV rows the query rows see, and the work lists for it."""

    def __init__(self, bounds: Int64Array, device: torch.device) -> None:
        """Takes `bounds`, `[rows, 2]` key indices."""
        host = [torch.from_numpy(bounds[:, i].astype(np.int32)) for i in (0, 1)]
        self.work = WorkLists(*host)
        self.begin, self.end = (x.to(device) for x in host)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Partial attention."""
        return partial_attention(
            q, k, v, self.begin, self.end, softmax_scale=q.shape[-1] ** -0.5,
            out_dtype=out_dtype, work=self.work,
        )  # fmt: skip

    def backward(
        self, rows: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
    ) -> Gradients:
        """dq, dk and dv in fp32; `rows` are q, dout, lse and delta."""
        q, dout, lse, delta = rows
        dk, dv = (torch.empty(x.shape, device=x.device) for x in (k, v))
        dq = partial_attention_backward(
            dout, q, k, v, lse, delta, self.begin, self.end, dk, dv,
            softmax_scale=q.shape[-1] ** -0.5, accumulate=False, work=self.work,
        )  # fmt: skip
        return dq, dk, dv
