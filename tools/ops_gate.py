"""What a contestant computes is right before it is timed: sampled rows and keys against fp64."""

import torch
from ops_contestants import Gradients, Problem
from torch import Tensor

NUM_SAMPLES = 8
# 16-bit results carry their own rounding and those of the probabilities, of ds and of out in delta.
MAX_ERROR = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


class Sample:
    """Some rows and keys of a problem, and what belongs there in fp64.

    lse and out enter the expected dk and dv as our forward gives them, once `forward_error` has
    found both right.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(1)

        def draw(limit: int) -> list[int]:
            return torch.randint(limit, (NUM_SAMPLES,), generator=generator).tolist()

        self.rows, self.row_heads = draw(len(problem.q)), draw(problem.q.shape[1])
        self.keys, self.key_heads = draw(len(problem.k)), draw(problem.k.shape[1])
        expected = [self._row(*pair) for pair in zip(self.rows, self.row_heads, strict=True)]
        self.out, self.lse, self.dq = (torch.stack(x) for x in zip(*expected, strict=True))

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        return MAX_ERROR[self.problem.shape.dtype]

    def forward_error(self, out: Tensor, lse: Tensor | None = None) -> float:
        """The worst sampled row.

        Args:
            out: `[rows, heads_q, head_dim_v]`.
            lse: `[rows, heads_q]`; its error is absolute, that of out relative.
        """
        worst = _worst(out[self.rows, self.row_heads], self.out)
        if lse is None:
            return worst
        got = lse[self.rows, self.row_heads].double()
        difference = torch.where(got == self.lse, torch.zeros_like(got), got - self.lse)
        return max(worst, float(difference.abs().max()))

    def backward_error(self, gradients: Gradients) -> float:
        """The worst sampled row of dq, dk and dv, THD."""
        dq, dk, dv = gradients
        expected = [self._key(*pair) for pair in zip(self.keys, self.key_heads, strict=True)]
        wanted_dk, wanted_dv = (torch.stack(x) for x in zip(*expected, strict=True))
        return max(
            _worst(dq[self.rows, self.row_heads], self.dq),
            _worst(dk[self.keys, self.key_heads], wanted_dk),
            _worst(dv[self.keys, self.key_heads], wanted_dv),
        )

    def _row(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and dq of one row and head."""
        p = self.problem
        seen = slice(int(p.begin[row]), int(p.end[row]))
        kv_head = head // (p.q.shape[1] // p.k.shape[1])
        k, v = (x[seen, kv_head].double() for x in (p.k, p.v))
        logits = k @ p.q[row, head].double() * p.softmax_scale
        lse = torch.logsumexp(logits, dim=0)
        probs = torch.exp(logits - lse) if len(k) else logits
        dprobs = v @ p.dout[row, head].double()
        ds = probs * (dprobs - (probs * dprobs).sum())
        return probs @ v, lse, p.softmax_scale * (ds @ k)

    def _key(self, key: int, kv_head: int) -> tuple[Tensor, Tensor]:
        """dk and dv of one key and kv head, over the rows that see it."""
        p = self.problem
        group = p.q.shape[1] // p.k.shape[1]
        heads = slice(kv_head * group, (kv_head + 1) * group)
        sees = (p.begin <= key) & (key < p.end)
        all_out, all_lse = p.attended
        q, dout, out, lse = (x[sees, heads].double() for x in (p.q, p.dout, all_out, all_lse))
        probs = torch.exp(q @ p.k[key, kv_head].double() * p.softmax_scale - lse)
        ds = probs * (dout @ p.v[key, kv_head].double() - (dout * out).sum(dim=-1))
        dk = p.softmax_scale * torch.einsum("rh,rhd->d", ds, q)
        return dk, torch.einsum("rh,rhd->d", probs, dout)


def _worst(got: Tensor, expected: Tensor) -> float:
    """Largest error of a row over its norm, or over the median norm where its own is smaller.

    dq of a row that sees one key is zero but for rounding, and would have any relative error.
    """
    norms = expected.norm(dim=-1)
    error = (got.double() - expected).norm(dim=-1)
    relative = error / norms.clamp(min=float(norms.median()))
    return float(relative.masked_fill(error == 0, 0.0).nan_to_num(torch.inf).max())
