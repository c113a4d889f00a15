"""What `bench_ops.py` times: shapes of attention calls and merges, and the speeds they aim at."""

import argparse
import re
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASKS = ("full", "causal", "packed", "scattered")
K = 1024
# Lengths of documents as packed training sees them: few long ones, many short ones; the first
# takes what the others leave of 64K.
PILE_LENS = (
    8192, 8192, 4096, 4096, 2048, 2048, 1024, 1024, 512, 512, 256, 256, 128, 128, 128, 64, 64,
)  # fmt: skip
PILE_TOKENS = 64 * K
PILE_RANKS, PILE_RANK, PILE_BLOCK = 8, 3, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One attention call.

    Attributes:
        name: for the command line and the tables.
        rows, keys: query rows and KV rows.
        heads: query and kv heads.
        head_dims: of q and k, and of v.
        mask: "full"; "causal", with as many rows as keys; "packed", causal documents of
            `pile_lens`; "scattered", what one rank of eight computes for the rows of the others
            when each document's blocks are dealt to the ranks one by one.
        dtype: "fp32", "bf16" or "fp16".
    """

    name: str
    rows: int
    keys: int
    heads: tuple[int, int]
    head_dims: tuple[int, int] = (128, 128)
    mask: str = "full"
    dtype: str = "bf16"

    @property
    def about(self) -> str:
        """The shape in words."""
        dims = self.head_dims
        dim = str(dims[0]) if dims[0] == dims[1] else f"({dims[0]}, {dims[1]})"
        heads = f"{self.heads[0]}/{self.heads[1]}"
        return f"{_tokens(self.rows)} x {_tokens(self.keys)} {self.mask}, {heads}, hd {dim}, " + (
            self.dtype
        )

    def flop(self, op: str, pairs: int) -> float:
        """Of the products of "forward" or "backward" over visible (row, key, head) triples."""
        dim_qk, dim_v = self.head_dims
        return 2.0 * pairs * (dim_qk + dim_v if op == "forward" else 3 * dim_qk + 2 * dim_v)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """`kv_begin`, `kv_end` of each row, `[rows]` int32, on the CPU."""
        if self.mask == "scattered":
            return _scattered()
        begin = torch.zeros(self.rows, dtype=torch.int32)
        if self.mask == "full":
            return begin, torch.full_like(begin, self.keys)
        if self.mask == "packed":
            lens = torch.tensor(pile_lens())
            begin = torch.repeat_interleave(lens.cumsum(0) - lens, lens).int()
        return begin, torch.arange(1, self.rows + 1, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeShape:
    """Partials of each row to be merged into a running fp32 result."""

    name: str
    partials: int
    rows: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def about(self) -> str:
        """The shape in words."""
        size = f"{_tokens(self.rows)} rows x {self.heads} heads x {self.head_dim}"
        return f"merge of {self.partials} {self.dtype} partials, {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A speed that the kernels are to reach.

    Attributes:
        shape, op: what is timed.
        of: against what: a contestant; "library", the fastest of the others; another shape, whose
            rate of ours is the measure; or "TFLOP/s".
        at_least: the ratio to it, or the rate.
    """

    shape: str
    op: str
    of: str
    at_least: float


def pile_lens() -> list[int]:
    """Document lengths of the masks "packed" and "scattered"."""
    return [PILE_TOKENS - sum(PILE_LENS), *PILE_LENS]


def _scattered() -> tuple[Tensor, Tensor]:
    """Of each row of another rank that sees keys of `PILE_RANK`."""
    lens = torch.tensor(pile_lens())
    start = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    token = torch.arange(PILE_TOKENS)
    is_held = token // PILE_BLOCK % PILE_RANKS == PILE_RANK
    held_before = torch.cat([torch.zeros(1, dtype=torch.int64), is_held.cumsum(0)])
    begin, end = held_before[start], held_before[token + 1]
    is_row = ~is_held & (end > begin)
    return begin[is_row].int(), end[is_row].int()


def _shape(name: str, spec: str) -> Shape:
    """Reads `16Kx16K,16/16,causal,hd64,fp16`: sizes and heads, then what differs from default."""
    fields = dict[str, object]()
    for part in spec.split(","):
        if size := re.fullmatch(r"(\d+)(K?)x(\d+)(K?)", part):
            a, unit_a, b, unit_b = size.groups()
            fields |= {"rows": int(a) * (K if unit_a else 1), "keys": int(b) * (K if unit_b else 1)}
        elif heads := re.fullmatch(r"(\d+)/(\d+)", part):
            fields["heads"] = (int(heads[1]), int(heads[2]))
        elif dims := re.fullmatch(r"hd(\d+)(?:/(\d+))?", part):
            fields["head_dims"] = (int(dims[1]), int(dims[2] or dims[1]))
        elif part in MASKS:
            fields["mask"] = part
        elif part in DTYPES:
            fields["dtype"] = part
        else:
            raise ValueError(f"{part!r} is no part of a shape")
    if not {"rows", "heads"} <= fields.keys():
        raise ValueError(f"{spec!r} needs sizes and heads")
    return Shape(name=name, **fields)  # pyright: ignore[reportArgumentType]


def parse_shape(text: str) -> Shape | MergeShape:
    """A shape by its name, or one described as `512x128K,32/8,full,hd128,bf16`.

    Raises:
        argparse.ArgumentTypeError: there is none of this name, or it describes none.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        shape = _shape(text, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(SHAPES)}, or as in 512x128K,32/8,hd128,bf16: "
            f"{error}"
        ) from None
    heads_q, heads_kv = shape.heads
    if min(shape.rows, shape.keys, *shape.heads, *shape.head_dims) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be at least 1")
    if heads_q % heads_kv:
        raise argparse.ArgumentTypeError(f"{text!r}: kv heads must divide query heads")
    if shape.mask == "causal" and shape.rows != shape.keys:
        raise argparse.ArgumentTypeError(f"{text!r}: causal needs as many rows as keys")
    if shape.mask in ("packed", "scattered"):
        raise argparse.ArgumentTypeError(f"{text!r}: {shape.mask} is a mask of named shapes")
    return shape


def _tokens(count: int) -> str:
    return f"{count // K}K" if count % K == 0 else str(count)


def _merges(partials: int, rows: int, heads: int, dtypes: tuple[str, ...]) -> list[MergeShape]:
    device = "" if rows > 2 * K else "cpu-"
    return [
        MergeShape(name=f"{device}merge-{dtype}", partials=partials, rows=rows, heads=heads,
                   head_dim=128, dtype=dtype)
        for dtype in dtypes
    ]  # fmt: skip


CUDA_SHAPES = [
    _shape("c16", "16Kx16K,16/16,causal"),
    _shape("f16", "16Kx16K,16/16"),
    _shape("c16fp16", "16Kx16K,16/16,causal,fp16"),
    _shape("c32g", "32Kx32K,32/8,causal"),
    _shape("cp8k", "8Kx128K,32/4"),
    _shape("q512", "512x128K,32/8"),
    _shape("q256", "256x128K,32/8"),
    _shape("q128", "128x128K,32/8"),
    _shape("q16", "16x128K,32/8"),
    _shape("h64c", "16Kx16K,32/32,causal,hd64"),
    _shape("mla", "16Kx16K,16/16,causal,hd192/128"),
    _shape("h256c", "16Kx16K,8/8,causal,hd256"),
    _shape("pile", "64Kx64K,32/8,packed"),
    _shape("scattered", "42496x8K,32/8,scattered"),
    *_merges(8, 16 * K, 32, ("fp32", "bf16", "fp16")),
]
CPU_SHAPES = [
    _shape("cpu-fp32", "2Kx2K,4/4,causal,fp32"),
    _shape("cpu-bf16", "2Kx2K,4/4,causal,bf16"),
    *_merges(4, 2 * K, 4, ("fp32", "bf16")),
]
SHAPES = {shape.name: shape for shape in (*CUDA_SHAPES, *CPU_SHAPES)}

_AIMS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("c16", "forward", {"cudnn": 1.08, "fa3": 1.0}),
    ("c16", "backward", {"cudnn": 1.05, "fa3": 1.0}),
    ("f16", "forward", {"cudnn": 1.02, "fa3": 1.0}),
    ("f16", "backward", {"cudnn": 1.05, "fa3": 1.0}),
    ("cp8k", "forward", {"cudnn": 1.1}),
    ("cp8k", "backward", {"cudnn": 1.1}),
    ("q512", "forward", {"library": 1.0}),
    ("q512", "backward", {"library": 1.4}),
    ("q256", "forward", {"TFLOP/s": 700}),
    ("q256", "backward", {"library": 1.5}),
    ("q128", "forward", {"TFLOP/s": 690}),
    ("q128", "backward", {"library": 1.7}),
    ("q16", "forward", {"TFLOP/s": 250}),
    ("q16", "backward", {"library": 3.0}),
    ("h64c", "forward", {"cudnn": 1.1}),
    ("h64c", "backward", {"cudnn": 1.1}),
    ("scattered", "forward", {"c16": 0.9}),
    ("scattered", "backward", {"c16": 0.9}),
    ("merge-fp32", "merge", {"copy": 0.85}),
    ("merge-bf16", "merge", {"copy": 0.85}),
    ("merge-fp16", "merge", {"copy": 0.85}),
)
# What the kernels are to reach on one H200.
AIMS = tuple(
    Aim(shape=shape, op=op, of=of, at_least=at_least)
    for shape, op, wanted in _AIMS
    for of, at_least in wanted.items()
)
