"""What `bench_cp.py` times: documents, masks and heads, and where baselines put their tokens."""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_splitkv.plan import Causal, Plan, Queries, Suffix, make_plan

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


def _one(name: str, length: int, heads: tuple[int, int]) -> Workload:
    return Workload(name=name, doc_lens=(length,), queries=Causal(), heads=heads)


def _rows(name: str, rows: int, keys: int, heads: tuple[int, int]) -> Workload:
    return Workload(name=name, doc_lens=(keys,), queries=Suffix(rows), heads=heads)


K = 1024
WORKLOADS = [
    _one("32k", 32 * K, (32, 32)),
    _one("128k", 128 * K, (32, 32)),
    _one("256k", 256 * K, (32, 32)),
    _one("32k-gqa", 32 * K, (32, 8)),
    _one("128k-gqa", 128 * K, (32, 8)),
    _one("256k-gqa", 256 * K, (32, 8)),
    Workload(
        name="pack", doc_lens=(20000, 12000, 768), queries=Causal(), heads=(32, 8)
    ),
    Workload(name="pile", doc_lens=pile_lens(128 * K), queries=Causal(), heads=(32, 8)),
    _rows("8k-128k", 8192, 128 * K, (32, 4)),
    _rows("8k-512k", 8192, 512 * K, (32, 4)),
    _rows("8k-1m", 8192, 1024 * K, (32, 4)),
    _rows("512-512k", 512, 512 * K, (32, 4)),
    _rows("128-512k", 128, 512 * K, (32, 4)),
]  # fmt: skip


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
