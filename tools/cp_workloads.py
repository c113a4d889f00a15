"""What `bench_cp.py` times: documents, masks and heads, and where baselines put their tokens."""

import argparse
import random
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_splitkv.plan import Causal, Plan, Queries, Suffix, choose_route, make_plan
from megatron_splitkv.plan.report import AttentionShape

Int64Array = npt.NDArray[np.int64]

# DistCA's statistics of ProLong documents (lognormal fit of 77,932 lengths), cut to a pack.
PILE_MU, PILE_SIGMA = 7.68, 0.74


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One line of the benchmark.

    Attributes:
        name: for the command line.
        doc_lens: tokens of each document.
        queries: the mask; `Suffix` is few query rows against a long context.
        heads: query and kv heads.
        head_dim: of q, k and v.
    """

    name: str
    doc_lens: tuple[int, ...]
    queries: Queries
    heads: tuple[int, int]
    head_dim: int = 128

    @property
    def num_tokens(self) -> int:
        """KV tokens of the pack."""
        return sum(self.doc_lens)

    def whole(self) -> Plan:
        """Everything on one rank."""
        return make_plan(self.doc_lens, 1, queries=self.queries)

    def shape(self, dtype: str) -> AttentionShape:
        """What its rows weigh."""
        return AttentionShape(
            num_heads_q=self.heads[0],
            num_heads_kv=self.heads[1],
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=dtype,
        )

    def route(self, cp_size: int, num_stages: int | None = None) -> str:
        """What travels where nobody says, as in Megatron's runs."""
        return choose_route(self.shape("bf16"), cp_size, self.queries, num_stages=num_stages)

    def flop(self) -> tuple[float, float]:
        """Of forward and backward, counting visible pairs: 2 products, and 5."""
        pairs = float(sum(self.whole().costs)) * self.heads[0]
        return 4.0 * self.head_dim * pairs, 10.0 * self.head_dim * pairs


def pile_lens(num_tokens: int, seed: int = 42) -> tuple[int, ...]:
    """Lengths drawn from a lognormal fit of real documents, until the pack is full."""
    draw = random.Random(seed)
    lens: list[int] = []
    left = num_tokens
    while left > 0:
        lens.append(min(left, max(1, int(draw.lognormvariate(PILE_MU, PILE_SIGMA)))))
        left -= lens[-1]
    return tuple(lens)


NAMES = (
    "32k", "128k", "256k", "32k-gqa", "128k-gqa", "256k-gqa", "pack", "pile", "8k-128k", "8k-512k",
    "8k-1m", "512-512k", "128-512k",
)  # fmt: skip


def workload_of(name: str) -> Workload:
    """Reads a name: `128k` and `128k-gqa`, one causal document with 32/32 and 32/8 heads;
    `8k-1m`, the last 8192 rows against 1M tokens, 32/4 heads; `pile-64k`, documents that fill a
    pack; `pile` of 128K tokens; `pack`.

    Raises:
        argparse.ArgumentTypeError: it is no such name.
    """
    size = r"([1-9]\d*[km]?)"
    if name == "pack":
        return Workload(name=name, doc_lens=(20000, 12000, 768), queries=Causal(), heads=(32, 8))
    if found := re.fullmatch(f"pile(?:-{size})?", name):
        lens = pile_lens(_tokens(found[1] or "128k"))
        return Workload(name=name, doc_lens=lens, queries=Causal(), heads=(32, 8))
    if found := re.fullmatch(f"{size}-{size}", name):
        rows, keys = _tokens(found[1]), _tokens(found[2])
        return Workload(name=name, doc_lens=(keys,), queries=Suffix(rows), heads=(32, 4))
    if found := re.fullmatch(f"{size}(-gqa)?", name):
        heads = (32, 8) if found[2] else (32, 32)
        return Workload(name=name, doc_lens=(_tokens(found[1]),), queries=Causal(), heads=heads)
    raise argparse.ArgumentTypeError(
        f"{name!r} must be one of {', '.join(NAMES)}, or name other sizes in the same way, as in "
        "64k-gqa, 2k-1m or pile-64k"
    )


def _tokens(text: str) -> int:
    """Reads `512`, `128k` or `1m`."""
    unit = {"k": 1024, "m": 1024**2}.get(text[-1], 1)
    return int(text.rstrip("km")) * unit


WORKLOADS = [workload_of(name) for name in NAMES]


def zigzag_tokens(doc_lens: tuple[int, ...], cp_size: int) -> list[Int64Array]:
    """Tokens of each rank when each document is cut into 2 * cp chunks, dealt to and fro.

    Rank r holds chunks r and 2 * cp - 1 - r of every document. Chunks of a document that does not
    divide differ by one token; implementations that need equal chunks pad instead.
    """
    parts: list[list[Int64Array]] = [[] for _ in range(cp_size)]
    start = 0
    for length in doc_lens:
        edges = [start + length * chunk // (2 * cp_size) for chunk in range(2 * cp_size + 1)]
        for rank in range(cp_size):
            for chunk in (rank, 2 * cp_size - 1 - rank):
                parts[rank].append(np.arange(edges[chunk], edges[chunk + 1], dtype=np.int64))
        start += length
    return [np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts]


def even_split(count: int, cp_size: int) -> list[Int64Array]:
    """Consecutive ranges of nearly equal length."""
    edges = [count * rank // cp_size for rank in range(cp_size + 1)]
    return [np.arange(edges[r], edges[r + 1], dtype=np.int64) for r in range(cp_size)]


def zigzag_rows(workload: Workload, cp_size: int) -> list[Int64Array]:
    """Query rows of each rank under zig-zag: those of its tokens, or the rows dealt alike."""
    if workload.whole().is_self_attention:
        return zigzag_tokens(workload.doc_lens, cp_size)
    assert isinstance(workload.queries, Suffix)
    lens = tuple(min(length, workload.queries.num_rows) for length in workload.doc_lens)
    return zigzag_tokens(lens, cp_size)
