"""Attention calls over a whole pack: simulated ranks, the dense oracle, and their comparison."""

import gc
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.comm import Counts, PassingTransport, Pending, ThreadGroup, Transport
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.layout import build_layout, shard_rows, unshard_rows
from megatron_splitkv.plan import Anchors, Causal, Full, Plan, Queries, Window, make_plan
from tests import oracle
from tests.packs import block_mask, owner_of_rows, pad_rows, plan_mask
from tests.tolerances import BY_DTYPE, GRADIENT_BY_DTYPE, Tolerance

GRADIENT_NAMES = ("dq", "dk", "dv", "dblock_k", "dblock_v", "dsink")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Head geometry of an attention call."""

    q: int = 4
    kv: int = 2
    dim_qk: int = 16
    dim_v: int = 16


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one attention call over a pack, in stream order, with the gradients to feed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None = None
    block_k: Tensor | None = None
    block_v: Tensor | None = None
    sink: Tensor | None = None
    softmax_scale: float | None = None

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """What gradients are taken of, in the order of `GRADIENT_NAMES`."""
        return (self.q, self.k, self.v, self.block_k, self.block_v, self.sink)


def random_inputs(
    plan: Plan,
    heads: Heads,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    has_sink: bool = False,
    has_dout: bool = True,
    has_dlse: bool = False,
    softmax_scale: float | None = None,
) -> Inputs:
    """N(0, 1) rounded to `dtype`, own-block keys when the plan has anchors."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = sum(plan.query_rows), plan.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    is_anchored = isinstance(plan.queries, Anchors)
    return Inputs(
        q=normal(rows, heads.q, heads.dim_qk),
        k=normal(tokens, heads.kv, heads.dim_qk),
        v=normal(tokens, heads.kv, heads.dim_v),
        dout=normal(rows, heads.q, heads.dim_v) if has_dout else None,
        dlse=normal(rows, heads.q).float() if has_dlse else None,
        block_k=normal(rows, heads.kv, heads.dim_qk) if is_anchored else None,
        block_v=normal(rows, heads.kv, heads.dim_v) if is_anchored else None,
        sink=normal(heads.q).float() if has_sink else None,
        softmax_scale=softmax_scale,
    )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Results in stream order; what does not exist is None."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dblock_k: Tensor | None = None
    dblock_v: Tensor | None = None
    dsink: Tensor | None = None

    def fingerprint(self) -> str:
        """Hash of every bit."""
        digest = hashlib.sha256()
        for name in ("out", "lse", *GRADIENT_NAMES):
            tensor = getattr(self, name)
            if tensor is not None:
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass
class RecordingTransport(PassingTransport):
    """Passes everything on and writes down each collective: its name, shape and counts."""

    calls: list[tuple] = field(default_factory=list)
    bytes_sent: int = 0

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        sent, coming = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        self.calls.append(("exchange", rows.shape[1], tuple(sent), tuple(coming)))
        self.bytes_sent += (sum(sent) - sent[self.rank]) * rows.shape[1]
        return self.inner.exchange(rows, counts)

    def all_gather(self, rows: Tensor) -> Pending:
        self.calls.append(("all_gather", *rows.shape))
        self.bytes_sent += (self.size - 1) * rows.numel()
        return self.inner.all_gather(rows)


class RankCall:
    """One attention call of one rank over its part of a pack: forward, then backward."""

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        transport: Transport | None,
        config: SplitKVConfig,
        queries: Queries | None = None,
        device: str = "cpu",
    ) -> None:
        self.rank = 0 if transport is None else transport.rank
        layout = build_layout(plan, self.rank, num_stages=config.num_stages, queries=queries)
        self.context = SplitKVContext(layout=layout.to(device), transport=transport, config=config)
        self.scale = inputs.softmax_scale
        self.rows = torch.from_numpy(np.flatnonzero(owner_of_rows(plan) == self.rank))
        of_rows, of_tokens = self.rows, layout.kv_index
        indices = (of_rows, of_tokens, of_tokens, of_rows, of_rows, None)
        self.leaves = [
            None
            if x is None
            else (x if index is None else shard_rows(x, index)).to(device, copy=True)
            for x, index in zip(inputs.leaves, indices, strict=True)
        ]
        for leaf in self.leaves:
            if leaf is not None:
                leaf.requires_grad_()
        self.upstream = [
            None if x is None else shard_rows(x, self.rows).to(device)
            for x in (inputs.dout, inputs.dlse)
        ]

    def forward(self) -> None:
        """Fills `out` and `lse`."""
        q, k, v, block_k, block_v, sink = self.leaves
        self.out, self.lse = splitkv_attention(
            q, k, v, self.context, softmax_scale=self.scale, sink=sink,
            block_kv=None if block_k is None else (block_k, block_v),
        )  # fmt: skip

    def backward(self) -> None:
        """Fills `grads`, None where there is no input."""
        used = [
            (x, dx) for x, dx in zip((self.out, self.lse), self.upstream, strict=True)
            if dx is not None
        ]  # fmt: skip
        given = [leaf for leaf in self.leaves if leaf is not None]
        grads = iter(torch.autograd.grad([x for x, _ in used], given, [dx for _, dx in used]))
        self.grads = [None if leaf is None else next(grads) for leaf in self.leaves]

    @property
    def parts(self) -> list[Tensor | None]:
        """Results of this rank on the CPU: out, lse, then gradients."""
        results = [self.out.detach(), self.lse.detach(), *self.grads]
        return [None if x is None else x.cpu() for x in results]


def join_ranks(plan: Plan, parts: Sequence[Sequence[Tensor | None]]) -> Outputs:
    """Puts the results of all ranks back in stream order; sink gradients are summed."""
    order = np.argsort(owner_of_rows(plan), kind="stable")
    back = torch.from_numpy(np.argsort(order))

    def rows(index: int) -> Tensor | None:
        if parts[0][index] is None:
            return None
        return torch.cat([part[index] for part in parts]).index_select(0, back)

    def tokens(index: int) -> Tensor:
        return unshard_rows([part[index] for part in parts], plan)

    sinks = [part[7] for part in parts]
    return Outputs(
        out=rows(0), lse=rows(1), dq=rows(2), dk=tokens(3), dv=tokens(4), dblock_k=rows(5),
        dblock_v=rows(6), dsink=None if sinks[0] is None else torch.stack(sinks).sum(0),
    )  # fmt: skip


def run_rank(
    plan: Plan,
    inputs: Inputs,
    transport: Transport | None,
    config: SplitKVConfig,
    queries: Queries | None = None,
    device: str = "cpu",
) -> list[Tensor | None]:
    """Forward and backward of one rank; what `join_ranks` takes."""
    call = RankCall(plan, inputs, transport, config, queries, device)
    call.forward()
    call.backward()
    return call.parts


def drift_of_random_steps(step_of: Callable[[Plan, Inputs, SplitKVConfig], object]) -> int:
    """Bytes of the GPU that stay allocated after 200 steps of other documents on two ranks,
    counted from step 20."""
    heads = Heads(q=4, kv=1, dim_qk=64, dim_v=64)
    at_step: list[int] = []
    gc.collect()
    gc.freeze()  # else each collection looks at all that was imported, which takes most of a step
    for step in range(200):
        draw = random.Random(step)
        docs = [draw.randint(1, 512) for _ in range(draw.randint(1, 8))]
        route = draw.choice(ROUTES)
        plan = make_plan(docs, 2, queries=draw.choice([Causal(), Window(100), Full()]), route=route)
        inputs = random_inputs(plan, heads, torch.bfloat16, seed=step)
        step_of(plan, inputs, SplitKVConfig(keep_queries=draw.random() < 0.5))
        gc.collect()
        at_step.append(torch.cuda.memory_allocated())
    gc.unfreeze()
    return max(at_step[20:]) - at_step[20]


def run_simulated(
    plan: Plan,
    inputs: Inputs,
    config: SplitKVConfig | None = None,
    queries: Queries | None = None,
    device: str = "cpu",
) -> Outputs:
    """Forward and backward on `plan.cp_size` simulated ranks, in stream order."""
    config = config or SplitKVConfig()
    group = ThreadGroup(plan.cp_size, device=device)
    return join_ranks(
        plan,
        group.run(lambda transport: run_rank(plan, inputs, transport, config, queries, device)),
    )


def dense(plan: Plan, inputs: Inputs, queries: Queries | None = None) -> Outputs:
    """What attention over the whole pack must give, in fp64 with an explicit mask.

    Wider than `oracle.attend`: own-block keys, a sink and a gradient of lse, each as one more term
    of one dense softmax. Where there is none of them, it is `oracle.attend`.
    """
    mask = torch.from_numpy(plan_mask(plan, queries))
    scale = inputs.q.shape[-1] ** -0.5 if inputs.softmax_scale is None else inputs.softmax_scale
    if inputs.dlse is None and inputs.sink is None and inputs.block_k is None:
        found = oracle.attend(
            inputs.q, inputs.k, inputs.v, mask, softmax_scale=scale, dout=inputs.dout
        )
        return Outputs(out=found.out, lse=found.lse, dq=found.dq, dk=found.dk, dv=found.dv)
    is_row, is_key = mask.any(1), mask.any(0)
    if inputs.block_k is not None:
        mask = torch.cat([mask, torch.from_numpy(block_mask(plan))], 1)
        is_row = mask.any(1)
    unused = (~is_row, ~is_key, ~is_key, None, None, None)
    leaves = [
        None if x is None else _fp64(x, rows).requires_grad_()
        for x, rows in zip(inputs.leaves, unused, strict=True)
    ]
    out, lse = _dense_softmax(leaves, mask, scale)
    loss = out.sum() * 0.0
    if inputs.dout is not None:
        loss = loss + (out * _fp64(inputs.dout, ~is_row)).sum()
    if inputs.dlse is not None:
        is_used = (lse > -torch.inf) & ~torch.from_numpy(pad_rows(plan))[:, None]
        loss = loss + (lse[is_used] * inputs.dlse.double()[is_used]).sum()
    given = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(loss, given, materialize_grads=True))
    named = {
        name: None if leaf is None else next(grads)
        for name, leaf in zip(GRADIENT_NAMES, leaves, strict=True)
    }
    return Outputs(out=out.detach(), lse=lse.detach(), **named)


def _fp64(tensor: Tensor, unused: Tensor | None) -> Tensor:
    tensor = tensor.detach().double()
    return tensor if unused is None else tensor.masked_fill(unused[:, None, None], 0.0)


def _dense_softmax(
    leaves: Sequence[Tensor | None], mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v, block_k, block_v, sink = leaves
    if block_k is not None:
        k, v = torch.cat([k, block_k]), torch.cat([v, block_v])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (torch.einsum("qhd,khd->qhk", q, k) * scale).masked_fill(~mask[:, None], -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None].expand(*scores.shape[:2], 1)], -1)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    is_empty = (scores == -torch.inf).all(-1)
    # Softmax of an empty row has no gradient that is a number: give it one score, then blank it.
    weights = torch.softmax(scores.masked_fill(is_empty[..., None], 0.0), -1)
    weights = weights.masked_fill(is_empty[..., None], 0.0)
    lse = torch.logsumexp(scores.masked_fill(is_empty[..., None], 0.0), -1)
    return torch.einsum("qhk,khd->qhd", weights, v), lse.masked_fill(is_empty, -torch.inf)


def assert_outputs(
    got: Outputs,
    expected: Outputs,
    dtype: torch.dtype = torch.float32,
    **tolerances: Tolerance,
) -> None:
    """Compares every result apart; `tolerances` replaces that of a name, as in `out=BF16`."""
    oracle.assert_lse_matches(got.lse, expected.lse)
    oracle.assert_matches("out", got.out, expected.out, tolerances.get("out", BY_DTYPE[dtype]))
    for name in GRADIENT_NAMES:
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            tolerance = tolerances.get(name, GRADIENT_BY_DTYPE[dtype])
            oracle.assert_matches(name, mine, theirs, tolerance)
