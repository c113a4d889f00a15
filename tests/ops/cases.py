"""Inputs of the attention ops, and running an op against the oracle."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_splitkv.ops import partial_attention, partial_attention_backward
from tests import tolerances
from tests.oracle import Oracle, assert_lse_matches, assert_matches, attend, mask_from_intervals

Intervals = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one call."""

    rows: int = 70
    keys: int = 150
    heads_q: int = 2
    heads_kv: int = 1
    dim_qk: int = 32
    dim_v: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of forward and backward; garbage wherever the contract allows it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kv_begin: Tensor
    kv_end: Tensor
    softmax_scale: float

    def oracle(self) -> Oracle:
        """The fp64 result, with gradients."""
        mask = mask_from_intervals(self.kv_begin, self.kv_end, len(self.k))
        scale = self.softmax_scale
        return attend(self.q, self.k, self.v, mask, softmax_scale=scale, dout=self.dout)

    def forward(self, out_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Runs the op."""
        return partial_attention(
            self.q,
            self.k,
            self.v,
            self.kv_begin,
            self.kv_end,
            softmax_scale=self.softmax_scale,
            out_dtype=out_dtype,
        )

    def delta(self, out: Tensor) -> Tensor:
        """`rowsum(dout * out)`, garbage in rows that see no key."""
        return (self.dout.float() * out).sum(dim=-1)

    def backward(self, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the op on fresh dk and dv; returns dq, dk, dv."""
        dk = torch.zeros(self.k.shape)
        dv = torch.zeros(self.v.shape)
        dq = self.backward_into(lse, delta, dk, dv)
        return dq, dk, dv

    def backward_into(
        self, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, *, accumulate: bool = True
    ) -> Tensor:
        """Runs the op; returns dq."""
        return partial_attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            lse,
            delta,
            self.kv_begin,
            self.kv_end,
            dk,
            dv,
            softmax_scale=self.softmax_scale,
            accumulate=accumulate,
        )


def random_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any interval at all; about half of them are empty."""
    begin = torch.randint(0, keys + 1, (rows,), generator=rng)
    end = torch.randint(0, keys + 1, (rows,), generator=rng)
    return begin.int(), end.int()


def causal_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows are the last tokens of one document of `keys` tokens."""
    end = torch.arange(keys - rows + 1, keys + 1).clamp(0, keys)
    return torch.zeros_like(end).int(), end.int()


def full_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Every row sees every key."""
    return torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)


def window_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A band of 9 keys; the first keys and the last ones are seen by no row."""
    begin = torch.arange(rows) * max(keys - 20, 0) // max(rows, 1) + 5
    return begin.clamp(max=keys).int(), (begin + 9).clamp(max=keys).int()


def scattered_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Short documents with gaps that nobody sees, and rows of them in random order."""
    begin = torch.arange(0, max(keys - 6, 1), 11).clamp(max=keys)
    document = torch.randint(0, len(begin), (rows,), generator=rng)
    length = torch.randint(1, 7, (rows,), generator=rng)
    return begin[document].int(), (begin[document] + length).clamp(max=keys).int()


def staggered_intervals(rows: int, keys: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Long intervals that start anywhere: row tiles overlap, KV tiles are cut."""
    begin = torch.randint(0, max(keys // 2, 1), (1 + rows // 50,), generator=rng)
    begin = begin.repeat_interleave(50)[:rows]
    return begin.int(), (begin + keys // 2).int()


INTERVALS: dict[str, Intervals] = {
    "random": random_intervals,
    "causal": causal_intervals,
    "full": full_intervals,
    "window": window_intervals,
    "scattered": scattered_intervals,
    "staggered": staggered_intervals,
}


def make_case(
    shape: Shape,
    *,
    intervals: str | Intervals = "random",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """N(0, 1) inputs; NaN in all rows that the contract says are never read."""
    rng = torch.Generator().manual_seed(seed)
    make_intervals = INTERVALS[intervals] if isinstance(intervals, str) else intervals
    kv_begin, kv_end = make_intervals(shape.rows, shape.keys, rng)

    def normal(rows: int, heads: int, dim: int, is_used: Tensor) -> Tensor:
        values = torch.randn((rows, heads, dim), generator=rng).to(dtype)
        return values.masked_fill(~is_used[:, None, None], torch.nan)

    mask = mask_from_intervals(kv_begin, kv_end, shape.keys)
    row_sees, key_seen = mask.any(dim=1), mask.any(dim=0)
    return Case(
        q=normal(shape.rows, shape.heads_q, shape.dim_qk, row_sees),
        k=normal(shape.keys, shape.heads_kv, shape.dim_qk, key_seen),
        v=normal(shape.keys, shape.heads_kv, shape.dim_v, key_seen),
        dout=normal(shape.rows, shape.heads_q, shape.dim_v, row_sees),
        kv_begin=kv_begin,
        kv_end=kv_end,
        softmax_scale=shape.dim_qk**-0.5,
    )


def check_forward(case: Case, out_dtype: torch.dtype = torch.float32) -> None:
    """Forward against the oracle."""
    oracle = case.oracle()
    out, lse = case.forward(out_dtype)
    assert out.dtype == out_dtype
    assert_lse_matches(lse, oracle.lse)
    assert_matches("out", out, oracle.out, tolerances.BY_DTYPE[out_dtype])
    assert (out[oracle.lse[:, 0] == -torch.inf] == 0).all(), "an empty row is not exactly zero"


def check_rounding(case: Case, lse: Tensor, delta: Tensor) -> None:
    """dk and dv in the dtype of the inputs, whatever they held: the bits of fp32, rounded once."""
    dtype = case.q.dtype
    exact = case.backward(lse, delta)
    rounded = [torch.full(x.shape, torch.nan, dtype=dtype) for x in (case.k, case.v)]
    dq = case.backward_into(lse, delta, *rounded, accumulate=False)
    assert torch.equal(dq, exact[0])
    for got, expected in zip(rounded, exact[1:], strict=True):
        assert torch.equal(got, expected.to(dtype))


def check_backward(case: Case, tolerance: tolerances.Tolerance = tolerances.FP32) -> None:
    """Backward, after our own forward, against the oracle; dk and dv are accumulated into.

    Once more for gradients in the dtype of the inputs, which are those of fp32, rounded.
    """
    oracle = case.oracle()
    out, lse = case.forward()
    check_rounding(case, lse, case.delta(out))
    dk, dv = torch.ones(case.k.shape), torch.full(case.v.shape, -2.0)
    dq = case.backward_into(lse, case.delta(out), dk, dv)
    is_unseen = ~mask_from_intervals(case.kv_begin, case.kv_end, len(case.k)).any(dim=0)
    assert (dk[is_unseen] == 1.0).all(), "dk of an unseen key was touched"
    assert (dv[is_unseen] == -2.0).all(), "dv of an unseen key was touched"
    assert_matches("dq", dq, oracle.dq, tolerance)
    assert_matches("dk", dk.double() - 1.0, oracle.dk, tolerance)
    assert_matches("dv", dv.double() + 2.0, oracle.dv, tolerance)
    assert (dq[oracle.lse[:, 0] == -torch.inf] == 0).all(), "dq of an empty row is not exactly zero"
