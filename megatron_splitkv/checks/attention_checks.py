"""`splitkv_attention` over the ranks of a group against the fp64 oracle, and what it sent.

Each rank works out the whole pack in fp64 for itself and compares its own rows, so nothing but the
attention itself is communicated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.checks import limits
from megatron_splitkv.checks.counting import CountingTransport
from megatron_splitkv.checks.op_checks import dtypes_of
from megatron_splitkv.checks.oracle import (
    Expected,
    dense_attention,
    document_mask,
    lse_error,
    own_block_mask,
)
from megatron_splitkv.checks.table import Check
from megatron_splitkv.checks.worst import Worst
from megatron_splitkv.comm import Transport, check_same_plan
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.layout import ShardLayout, build_layout, shard_rows
from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Plan,
    Prefix,
    Queries,
    Suffix,
    Window,
    make_plan,
)
from megatron_splitkv.plan.report import AttentionShape, report_plan
from megatron_splitkv.plan.route import has_route

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Documents, a mask, heads and a route.

    Attributes:
        name: for notes.
        doc_lens: tokens of each document.
        queries: the mask.
        heads: query and kv heads.
        head_dim: of q, k and v.
        route: what travels.
    """

    name: str
    doc_lens: tuple[int, ...]
    queries: Queries
    heads: tuple[int, int]
    head_dim: int
    route: str = "queries"

    def __str__(self) -> str:
        return self.name


def attention_cases() -> list[AttentionCase]:
    """One case for each mask, on each route that it has; lengths that divide by nothing."""
    anchors = Anchors(((40, 333, 600), (), (0, 77)), 4)
    by_queries = [
        AttentionCase(name="packed documents, causal", doc_lens=(307, 1, 0, 77, 514),
                      queries=Causal(), heads=(4, 2), head_dim=64),
        AttentionCase(name="one document, causal", doc_lens=(701,), queries=Causal(),
                      heads=(4, 4), head_dim=128),
        AttentionCase(name="window", doc_lens=(450, 33, 200), queries=Window(100),
                      heads=(4, 1), head_dim=64),
        AttentionCase(name="full", doc_lens=(389, 130), queries=Full(), heads=(3, 1),
                      head_dim=64),
        AttentionCase(name="prefix in full", doc_lens=(301, 0, 260), queries=Prefix((90, 0, 260)),
                      heads=(4, 2), head_dim=64),
        AttentionCase(name="last rows of documents", doc_lens=(900, 60), queries=Suffix(96),
                      heads=(4, 2), head_dim=128),
        AttentionCase(name="anchors with their blocks", doc_lens=(640, 5, 190), queries=anchors,
                      heads=(4, 2), head_dim=64),
    ]  # fmt: skip
    by_keys = [
        replace(case, name=f"{case.name}, keys travel", route="keys")
        for case in by_queries
        if has_route("keys", case.queries)
    ]
    return by_queries + by_keys


class RankCall:
    """One case on one rank: its tensors, its call, and what the oracle expects of it."""

    def __init__(
        self,
        case: AttentionCase,
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport | None,
        config: SplitKVConfig,
    ) -> None:
        """Draws the whole pack, the same on every rank, and takes this rank's rows."""
        self.case = case
        self.config = config
        self.counting = None if transport is None else CountingTransport(transport)
        cp_size, rank = (1, 0) if transport is None else (transport.size, transport.rank)
        self.plan = make_plan(
            case.doc_lens, cp_size, queries=case.queries, block_size=BLOCK_SIZE, route=case.route
        )
        layout = build_layout(self.plan, rank, num_stages=config.num_stages)
        self.rows = query_rows_of(self.plan, layout)
        self.context = SplitKVContext(
            layout=layout.to(device), transport=self.counting, config=config
        )
        whole = _inputs(case, sum(self.plan.query_rows), dtype)
        self.expected = _expected(case, *whole)
        *leaves, dout = whole
        indices = (self.rows, layout.kv_index, layout.kv_index, self.rows, self.rows)
        self.leaves = [
            shard_rows(tensor, index).to(device).requires_grad_()
            for tensor, index in zip(leaves, indices, strict=False)
        ]
        self.dout = shard_rows(dout, self.rows).to(device)
        self.bytes_forward = self.bytes_backward = 0

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Forward and backward; out, lse and the gradients of the leaves of this rank."""
        q, k, v, *block = self.leaves
        block_kv = (block[0], block[1]) if block else None
        out, lse = splitkv_attention(q, k, v, self.context, block_kv=block_kv)
        self.bytes_forward = self._sent()
        gradients = torch.autograd.grad(out, self.leaves, self.dout)
        self.bytes_backward = self._sent() - self.bytes_forward
        return out.detach(), lse.detach(), list(gradients)

    def _sent(self) -> int:
        return 0 if self.counting is None else self.counting.bytes_sent

    def predicted_bytes(self) -> tuple[int, int]:
        """What the plan says this rank sends, forward and backward."""
        shape = AttentionShape(
            num_heads_q=self.case.heads[0],
            num_heads_kv=self.case.heads[1],
            head_dim_qk=self.case.head_dim,
            head_dim_v=self.case.head_dim,
            dtype=limits.DTYPE_NAMES[self.dout.dtype],
        )
        report = report_plan(self.plan, shape, self.config)
        rank = self.context.layout.cp_rank
        return report.bytes_forward[rank], report.bytes_backward[rank]


def query_rows_of(plan: Plan, layout: ShardLayout) -> Tensor:
    """Rows of the query stream that a rank owns, `[num_query_rows]` int64, on the CPU."""
    if plan.is_self_attention:
        return layout.kv_index
    start = sum(plan.query_rows[: layout.cp_rank])
    return torch.arange(start, start + layout.num_query_rows)


def _inputs(case: AttentionCase, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, own-block k and v where there are anchors, and dout, of the whole pack."""
    generator = torch.Generator().manual_seed(len(case.name))
    (heads_q, heads_kv), tokens = case.heads, sum(case.doc_lens)
    shapes = [(num_rows, heads_q), (tokens, heads_kv), (tokens, heads_kv)]
    if isinstance(case.queries, Anchors):
        shapes += [(num_rows, heads_kv)] * 2
    shapes.append((num_rows, heads_q))
    return [torch.randn(*shape, case.head_dim, generator=generator).to(dtype) for shape in shapes]


def _expected(case: AttentionCase, *tensors: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and the gradient of each leaf, for the whole pack."""
    q, k, v, *block, dout = tensors
    mask = document_mask(case.queries, case.doc_lens)
    num_keys = len(k)
    if isinstance(case.queries, Anchors):
        k, v = torch.cat([k, block[0]]), torch.cat([v, block[1]])
        mask = torch.cat([mask, own_block_mask(len(q), case.queries.rows_per_anchor)], 1)
    found: Expected = dense_attention(q, k, v, dout, mask, softmax_scale=case.head_dim**-0.5)
    gradients = [found.dq, found.dk[:num_keys], found.dv[:num_keys]]
    if block:
        gradients += [found.dk[num_keys:], found.dv[num_keys:]]
    return found.out, found.lse, gradients


def check_attention(
    device: torch.device, transport: Transport | None, config: SplitKVConfig
) -> list[Check]:
    """Results and bytes of every case on each route, in every dtype of the device.

    Args:
        device: where the tensors of this rank are.
        transport: the context-parallel group; None for one rank.
        config: settings, as a run would have them.
    Returns:
        Checks of this rank; all ranks make the same ones.
    """
    checks: list[Check] = []
    bytes_seen = {route: _BytesSeen(route) for route in ROUTES}
    for dtype in dtypes_of(device):
        for route in ROUTES:
            name = str(dtype).removeprefix("torch.")
            worst = Worst(f"attention over the group, {name}, {route} travel")
            cases = [case for case in attention_cases() if case.route == route]
            for case in cases:
                call = RankCall(case, dtype, device, transport, config)
                _see_case(worst, call, bytes_seen[route])
            checks += worst.checks(f"worst of {len(cases)} masks")
    for seen in bytes_seen.values():
        checks += seen.checks(1 if transport is None else transport.size)
    checks += [_check_reach(device, transport, config, route) for route in ROUTES]
    checks += _check_plans(device, transport)
    return checks


def _see_case(worst: Worst, call: RankCall, bytes_seen: "_BytesSeen") -> None:
    out, lse, gradients = call.run()
    bytes_seen.see(call)
    dtype = call.dout.dtype
    index, rows = call.context.layout.kv_index.cpu(), call.rows
    expected_out, expected_lse, expected_gradients = call.expected
    limit = limits.attention_limit("out", dtype, call.config)
    worst.see("out", call.case, out, expected_out[rows], limit)
    worst.see_lse(call.case, lse_error(lse, expected_lse[rows]), limits.lse_limit(out.device))
    names = ("dq", "dk", "dv", "dk of own blocks", "dv of own blocks")
    taken = (rows, index, index, rows, rows)
    limit = limits.attention_limit("gradient", dtype, call.config)
    for name, which, got, due in zip(names, taken, gradients, expected_gradients, strict=False):
        worst.see(name, call.case, got, due[which], limit)


class _BytesSeen:
    """Bytes that this rank sent on a route beside those that the plans predicted."""

    def __init__(self, route: str) -> None:
        self.route = route
        self._sent = [0, 0]
        self._largest = [(0.0, ""), (0.0, "")]

    def see(self, call: RankCall) -> None:
        sent = (call.bytes_forward, call.bytes_backward)
        for way, (found, due) in enumerate(zip(sent, call.predicted_bytes(), strict=True)):
            self._sent[way] += found
            share = abs(found - due) / due if due else float(found > 0)
            note = f"{call.case}: {found} sent, {due} predicted"
            self._largest[way] = max(self._largest[way], (share, note))

    def checks(self, cp_size: int) -> Iterator[Check]:
        section = "communication"
        for way, sent, (share, note) in zip(
            ("forward", "backward"), self._sent, self._largest, strict=True
        ):
            due = 1 if cp_size > 1 else 0
            yield Check(
                section=section, name=f"bytes sent, {way}, {self.route}", value=sent, limit=due,
                bound="at least",
                note="of the rank that sent least" if cp_size > 1 else "one rank sends nothing",
            )  # fmt: skip
            yield Check(
                section=section, name=f"sent / predicted - 1, {way}, {self.route}", value=share,
                limit=limits.BYTES, note="" if share <= limits.BYTES else note,
            )  # fmt: skip


def _check_reach(
    device: torch.device, transport: Transport | None, config: SplitKVConfig, route: str
) -> Check:
    """Every row must see the keys of every rank: values that name the rank they lie on.

    `v` is one-hot in the rank of its key, so element j of an output is the weight of rank j's keys.
    All logits are zero: that weight is the share of the tokens that rank j holds.
    """
    cp_size, rank = (1, 0) if transport is None else (transport.size, transport.rank)
    dim = next(size for size in (64, 128, 256, 512) if size >= min(cp_size, 512))
    plan = make_plan(
        [cp_size * BLOCK_SIZE], cp_size, queries=Full(), block_size=BLOCK_SIZE, route=route
    )
    layout = build_layout(plan, rank, num_stages=config.num_stages).to(device)
    context = SplitKVContext(layout=layout, transport=transport, config=config)
    dtype = dtypes_of(device)[0]
    q, k, v = (
        torch.zeros(layout.num_kv_rows, 1, dim, dtype=dtype, device=device) for _ in range(3)
    )
    v[:, :, rank % dim] = 1.0
    out, _ = splitkv_attention(q, k, v, context)
    weights = out[:, 0, : min(cp_size, dim)].float()
    return Check(
        section="communication",
        name=f"least weight of a rank's keys, x ranks, {route}",
        value=float(weights.min()) * min(cp_size, dim),
        limit=0.99,
        bound="at least",
        note="1: rows see all ranks alike; 0: attention stays on its rank",
    )


def _check_plans(device: torch.device, transport: Transport | None) -> list[Check]:
    """Ranks that were fed alike agree; one rank that was fed otherwise is noticed by all."""
    if transport is None:
        return []
    plans = [make_plan(lens, transport.size, block_size=BLOCK_SIZE) for lens in ([300], [299, 1])]
    noticed: list[str] = []
    for fed in (plans[0], plans[int(transport.rank == transport.size - 1)]):
        try:
            check_same_plan(fed.fingerprint, transport, device)
            noticed.append("")
        except ValueError as error:
            noticed.append(str(error))
    section = "same plan on every rank"
    return [
        Check(section=section, name="refused where all were fed alike",
              value=float(noticed[0] != ""), limit=0, note=noticed[0]),
        Check(section=section, name="refused where one was fed other documents",
              value=float(noticed[1] != ""), limit=1, bound="at least"),
    ]  # fmt: skip
