"""What a plan costs: loads, tokens and bytes, in numbers and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from megatron_splitkv.config import WIRE_ALIGNMENT_BYTES, SplitKVConfig
from megatron_splitkv.plan.exchange import plan_exchange
from megatron_splitkv.plan.key_exchange import num_head_groups, plan_key_exchange
from megatron_splitkv.plan.plan import Int64Array, Plan

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a travelling row weighs.

    Attributes:
        num_heads_q: query heads on one rank (after tensor parallelism).
        num_heads_kv: key and value heads on one rank; a divisor of the query heads.
        head_dim_qk, head_dim_v: elements of a query head and of an output head.
        dtype: "fp32", "bf16" or "fp16", the dtype of q, k and v.
    Raises:
        ValueError: an unknown dtype, a head or dim below 1, or KV heads that do not divide the
            query heads.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; use {', '.join(DTYPE_BYTES)}")
        heads = self.num_heads_q, self.num_heads_kv
        if min(*heads, self.head_dim_qk, self.head_dim_v) < 1:
            raise ValueError(f"heads and head dims must be at least 1, got {self}")
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_kv={self.num_heads_kv} must divide num_heads_q={self.num_heads_q}, "
                "because each kv head serves equally many query heads"
            )

    def forward_bytes(self, config: SplitKVConfig) -> tuple[int, int]:
        """Bytes of a query row out (q) and back (partial out, lse, and the scale of fp16)."""
        out = _padded(self.num_heads_q * self.head_dim_qk * DTYPE_BYTES[self.dtype])
        back = self._partial_bytes(self.num_heads_q, self.head_dim_v, config)
        return out, back + _padded(4 * self.num_heads_q)

    def backward_bytes(self, config: SplitKVConfig) -> tuple[int, int]:
        """Bytes of a query row out (dout, lse, delta, q unless kept) and back (dq, and a scale)."""
        element = DTYPE_BYTES[self.dtype]
        out = _padded(self.num_heads_q * self.head_dim_v * element)
        out += 2 * _padded(4 * self.num_heads_q)
        if not config.keep_queries:
            out += _padded(self.num_heads_q * self.head_dim_qk * element)
        return out, self._partial_bytes(self.num_heads_q, self.head_dim_qk, config)

    def key_bytes(self, config: SplitKVConfig, num_groups: int) -> tuple[int, int]:
        """Bytes of a key out (k and v) and back (dk and dv, with scales), all groups together.

        Args:
            config: settings of the run.
            num_groups: groups of KV heads, each of which travels as rows of its own.
        """
        heads, dims = self.num_heads_kv // num_groups, (self.head_dim_qk, self.head_dim_v)
        out = sum(_padded(heads * dim * DTYPE_BYTES[self.dtype]) for dim in dims)
        back = sum(self._partial_bytes(heads, dim, config) for dim in dims)
        return num_groups * out, num_groups * back

    def _partial_bytes(self, num_heads: int, head_dim: int, config: SplitKVConfig) -> int:
        """One row of partial values, with their scales."""
        partial_dtype = config.resolved_partial_dtype(self.dtype)
        values = _padded(num_heads * head_dim * DTYPE_BYTES[partial_dtype])
        return values + (_padded(4 * num_heads) if partial_dtype == "fp16" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What travels in one attention layer: rows of queries or of keys, as the plan has it.

    Attributes:
        rows: rows that each rank sends to each other one, `[cp_size, cp_size]` int64.
        attended: query rows that each rank attends with, `[cp_size]` int64.
        forward, backward: bytes of a row out and of what comes back for it.
        num_exchanges: of one direction at most; 0 in a group of one.
    """

    rows: Int64Array
    attended: Int64Array
    forward: tuple[int, int]
    backward: tuple[int, int]
    num_exchanges: int


def count_traffic(plan: Plan, shape: AttentionShape, config: SplitKVConfig) -> Traffic:
    """Counts what travels in one attention layer; exact, the bytes are those on the wire."""
    if plan.route == "keys":
        num_groups = num_head_groups(
            shape.num_heads_kv, shape.num_heads_q, max(plan.query_rows), config.num_stages
        )
        out, back = shape.key_bytes(config, num_groups)
        return Traffic(
            rows=plan_key_exchange(plan).travelling(),
            attended=np.asarray(plan.query_rows, dtype=np.int64),
            forward=(out, 0),
            backward=(0 if config.keep_queries else out, back),
            num_exchanges=num_groups if plan.cp_size > 1 else 0,
        )
    exchange = plan_exchange(plan)
    return Traffic(
        rows=exchange.sent(config.num_stages),
        attended=exchange.counts.sum(axis=0),
        forward=shape.forward_bytes(config),
        backward=shape.backward_bytes(config),
        num_exchanges=exchange.num_exchanges(config.num_stages),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Figures of a plan for one attention layer.

    Attributes:
        shape, config: what the bytes were counted for.
        fingerprint, route: of the plan.
        cost: visible query-key pairs of each rank: those of its keys, or of its query rows where
            keys travel.
        tokens: KV tokens of each rank.
        runs: runs of consecutive keys of one document, for each rank.
        documents: documents with a token on the rank, for each rank.
        whole_documents: documents that live on a single rank; they cost no bytes.
        bytes_forward, bytes_backward: bytes that each rank sends in one layer.
    """

    shape: AttentionShape
    config: SplitKVConfig
    fingerprint: str
    route: str
    cost: tuple[int, ...]
    tokens: tuple[int, ...]
    runs: tuple[int, ...]
    documents: tuple[int, ...]
    whole_documents: int
    bytes_forward: tuple[int, ...]
    bytes_backward: tuple[int, ...]

    @property
    def cost_max_over_mean(self) -> float:
        """Largest cost over the mean; 1.0 is perfect balance."""
        return max_over_mean(self.cost)

    @property
    def tokens_max_over_mean(self) -> float:
        """Largest token count over the mean."""
        return max_over_mean(self.tokens)

    def as_dict(self) -> dict[str, object]:
        """The figures as plain values: byte totals over all ranks, then each rank's own."""
        per_rank = {
            "cost": self.cost,
            "tokens": self.tokens,
            "runs": self.runs,
            "documents": self.documents,
            "bytes_forward": self.bytes_forward,
            "bytes_backward": self.bytes_backward,
        }
        return {
            "fingerprint": self.fingerprint,
            "route": self.route,
            "cost_max_over_mean": self.cost_max_over_mean,
            "tokens_max_over_mean": self.tokens_max_over_mean,
            "cost": self.cost,
            "tokens": self.tokens,
            "whole_documents": self.whole_documents,
            "bytes_forward": sum(self.bytes_forward),
            "bytes_backward": sum(self.bytes_backward),
            "ranks": [
                {"rank": rank, **{name: values[rank] for name, values in per_rank.items()}}
                for rank in range(len(self.cost))
            ],
        }

    def as_table(self) -> Table:
        """One line for each rank, with max/mean of each column below and its units as caption."""
        shape = self.shape
        partial = self.config.resolved_partial_dtype(shape.dtype)
        is_keys = self.route == "keys"
        heads = f"{shape.num_heads_kv} kv heads" if is_keys else f"{shape.num_heads_q} query heads"
        returned = "gradients" if is_keys else "partials"
        table = Table(
            "rank", "cost (pairs)", "tokens", "runs", "documents", "MB fwd", "MB bwd",
            width=79,
            caption="MB (10^6 bytes): sent by this rank in one attention layer, for "
            f"{heads} of dim {shape.head_dim_qk} (qk) and "
            f"{shape.head_dim_v} (v) in {shape.dtype}, {returned} in {partial}; "
            f"{self.route} travel",
            caption_justify="left",
        )  # fmt: skip
        for column in table.columns:
            column.justify = "right"
        columns = (
            self.cost, self.tokens, self.runs, self.documents, self.bytes_forward,
            self.bytes_backward,
        )  # fmt: skip
        for rank, (cost, tokens, runs, documents, forward, backward) in enumerate(
            zip(*columns, strict=True)
        ):
            table.add_row(
                str(rank), f"{cost:,}", f"{tokens:,}", f"{runs:,}", f"{documents:,}",
                f"{forward / 1e6:.2f}", f"{backward / 1e6:.2f}",
            )  # fmt: skip
        table.add_section()
        table.add_row("max/mean", *(f"{max_over_mean(column):.4f}" for column in columns))
        return table


def report_plan(plan: Plan, shape: AttentionShape, config: SplitKVConfig) -> PlanReport:
    """Counts what a plan costs in one attention layer; exact, the bytes are those on the wire."""
    traffic = count_traffic(plan, shape, config)
    sent, answered = traffic.rows.sum(axis=1).tolist(), traffic.rows.sum(axis=0).tolist()

    def sent_bytes(out: int, back: int) -> tuple[int, ...]:
        return tuple(s * out + a * back for s, a in zip(sent, answered, strict=True))

    pairs = np.unique(plan.runs[:, :2], axis=0)  # rank and document
    ranks_of_document = np.unique(pairs[:, 1], return_counts=True)[1]
    num_runs, documents = (
        np.bincount(ranks, minlength=plan.cp_size).tolist()
        for ranks in (plan.runs[:, 0], pairs[:, 0])
    )
    return PlanReport(
        shape=shape,
        config=config,
        fingerprint=plan.fingerprint,
        route=plan.route,
        cost=plan.costs,
        tokens=plan.tokens,
        runs=tuple(num_runs),
        documents=tuple(documents),
        whole_documents=int((ranks_of_document == 1).sum()),
        bytes_forward=sent_bytes(*traffic.forward),
        bytes_backward=sent_bytes(*traffic.backward),
    )


def kv_ring_bytes(plan: Plan, shape: AttentionShape) -> tuple[int, int]:
    """Bytes that a dense KV ring or all-gather would send for the same pack, in one layer.

    Every rank gets the keys and values of all others, whatever the mask, in the dtype of the shape:
    `(cp - 1) / cp` of all KV bytes from each rank. The backward pass sends them again and as many
    bytes of dK and dV. Exact for a ring that does so; real ones may add pads, or use fp32 for dK
    and dV.

    Returns:
        Bytes of the forward and of the backward pass, summed over the ranks.
    """
    token = shape.num_heads_kv * (shape.head_dim_qk + shape.head_dim_v) * DTYPE_BYTES[shape.dtype]
    forward = (plan.cp_size - 1) * plan.num_tokens * token
    return forward, 2 * forward


def max_over_mean(values: Sequence[int]) -> float:
    """Largest value over the mean; 1.0 where all are zero."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _padded(size: int) -> int:
    return -(-size // WIRE_ALIGNMENT_BYTES) * WIRE_ALIGNMENT_BYTES
