"""The one configuration object of the package."""

import math
from dataclasses import dataclass

PARTIAL_DTYPES = ("auto", "fp32", "bf16", "fp16")
# What "auto" means for a dtype of inputs: the cheapest format that keeps the error of 8 ranks
# within 1.25 times that of one (tools/results/2026-11-29-h200-runtime.md).
AUTO_PARTIAL_DTYPES = {"fp32": "fp32", "bf16": "fp16", "fp16": "fp32"}
ROUTES = ("queries", "keys")  # what travels; the other side of attention stays
TRANSPORTS = ("auto", "nccl", "symmetric", "gloo")
KV_TILE_TOKENS = 64  # the smallest KV tile of our kernels; user-set block sizes are multiples of it
WIRE_ALIGNMENT_BYTES = 16  # each field of a travelling row starts at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKVConfig:
    """Settings of Split-KV that hold for a whole run.

    Attributes:
        block_size: KV tokens of one planner block, a multiple of 64: documents are cut at its
            multiples where the balance allows. None takes the largest power of two up to 512 that
            leaves each rank at least 16 blocks.
        route: what travels between ranks: "queries" to the keys, and partial outputs back; or
            "keys" to the query rows, and their gradients back, under causal, window and full masks.
            Keys are fewer bytes where several query heads share a KV head, but what a rank gathers
            of them grows with the context; `choose_route` weighs both.
        num_stages: upper bound on the number of exchanges that the other ranks' query rows are cut
            into; each brings some blocks of the rows of every rank. More stages mean smaller
            buffers and more overlap, and more collectives. None makes as many that each brings
            about half as many rows as a rank owns, and no fewer than about 8192. Where keys travel,
            it bounds the groups of KV heads that travel one after the other; None makes at most 2.
        partial_dtype: wire format of returned partial outputs and gradients: "fp32", "bf16",
            "fp16" (beside an fp32 scale for each row and head), or "auto", which is fp16 for bf16
            inputs and else fp32. Merging is always done in fp32.
        transport: "symmetric" has the GPUs of one host read each other's memory by copy engines;
            "auto" is that where it can be had, else the backend of the process group, NCCL on GPUs;
            "nccl" insists on NCCL; "gloo" stages the rows of a GPU through host memory, for
            processes that share it.
        keep_queries: keep what the forward pass gathered, query rows or keys and values, for the
            backward pass instead of gathering it again: less traffic, more memory.
        balance_tolerance: share by which the dearest rank may exceed the mean cost before the
            planner cuts documents that it could have kept whole.
        ranks_per_node: consecutive context-parallel ranks of one node: documents keep to few nodes,
            so that few rows cross between them. None takes all ranks for equally near.
        rank_speeds: relative speed of each context-parallel rank, by which it gets more or less of
            the cost; empty where all are alike.
        check_plan: "first" compares plan fingerprints over the group on a group's first batch,
            "always" on each new plan.
        mtp_normalization: "global" scales multi-token-prediction losses by token counts of the
            whole context-parallel group, so that they equal a run without context parallelism;
            "megatron" keeps the rank-local ratio of Megatron.
    """

    block_size: int | None = None
    route: str = "queries"
    num_stages: int | None = None
    partial_dtype: str = "auto"
    transport: str = "auto"
    keep_queries: bool = False
    balance_tolerance: float = 0.001
    ranks_per_node: int | None = None
    rank_speeds: tuple[float, ...] = ()
    check_plan: str = "first"
    mtp_normalization: str = "global"

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and (size <= 0 or size % KV_TILE_TOKENS != 0):
            raise ValueError(
                f"block_size={size} must be a positive multiple of {KV_TILE_TOKENS} (the kernels' "
                f"KV tile); use {max(1, -(-size // KV_TILE_TOKENS)) * KV_TILE_TOKENS}, or leave it "
                "out to have it chosen"
            )
        _check_choice("route", self.route, ROUTES)
        if self.num_stages is not None and self.num_stages < 1:
            raise ValueError(
                f"num_stages={self.num_stages} must be at least 1; leave it out to have it chosen"
            )
        _check_choice("partial_dtype", self.partial_dtype, PARTIAL_DTYPES)
        _check_choice("transport", self.transport, TRANSPORTS)
        if not 0.0 <= self.balance_tolerance <= 1.0:
            raise ValueError(
                f"balance_tolerance={self.balance_tolerance} must lie in [0, 1]; 0.001 is 0.1 %"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} must be at least 1; leave it out where all "
                "ranks are equally near"
            )
        if not all(0.0 < speed < math.inf for speed in self.rank_speeds):
            raise ValueError(f"rank_speeds={self.rank_speeds} must be positive and finite")
        _check_choice("check_plan", self.check_plan, ("first", "always"))
        _check_choice("mtp_normalization", self.mtp_normalization, ("global", "megatron"))

    def resolved_partial_dtype(self, dtype: str) -> str:
        """The wire format of partials for inputs of `dtype`: "fp32", "bf16" or "fp16"."""
        is_auto = self.partial_dtype == "auto"
        return AUTO_PARTIAL_DTYPES[dtype] if is_auto else self.partial_dtype


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
