"""Every method is right before it is timed: a small problem of its kind, against dense fp64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cp_methods import Gradients, Method, RankInputs
from cp_workloads import Workload
from torch import Tensor

from megatron_splitkv.checks import limits
from megatron_splitkv.checks.oracle import Expected, dense_attention, error_of
from megatron_splitkv.comm import ThreadGroup, Transport
from megatron_splitkv.config import SplitKVConfig

MAX_GATE_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small problem with the heads, the mask and the dtype of a large one."""

    workload: Workload
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    expected: Expected


def small_case(kind: type[Method], workload: Workload, cp_size: int, dtype: torch.dtype) -> Case:
    """Draws the problem on the CPU, the same in every process, and works it out in fp64."""
    small = kind.small(workload, cp_size)
    mask = kind.mask(small)
    (heads_q, heads_kv), dim = workload.heads, workload.head_dim
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype)

    rows, tokens = mask.shape
    q, k, v = normal(rows, heads_q), normal(tokens, heads_kv), normal(tokens, heads_kv)
    dout = normal(rows, heads_q)
    expected = dense_attention(q, k, v, dout, mask, softmax_scale=dim**-0.5)
    return Case(workload=small, tensors=(q, k, v, dout), expected=expected)


def run_part(
    method: Method, case: Case, transport: Transport | None, device: torch.device
) -> tuple[Tensor, Gradients]:
    """out and gradients of one rank."""
    rank = 0 if transport is None else transport.rank
    q, k, v, dout = case.tensors
    rows, tokens = (torch.from_numpy(x[rank]) for x in (method.rows, method.tokens))
    taken = [x[index].to(device) for x, index in ((q, rows), (k, tokens), (v, tokens))]
    mine = RankInputs(q=taken[0], k=taken[1], v=taken[2], dout=dout[rows].to(device))
    part = method.part(rank, transport, device)
    out = part.forward(mine)
    return out, part.backward(mine.dout)


def worst_share(method: Method, case: Case, rank: int, got: tuple[Tensor, Gradients]) -> float:
    """The largest error of a rank's results as a share of its limit."""
    rows, tokens = (torch.from_numpy(x[rank]) for x in (method.rows, method.tokens))
    dtype, expected = case.tensors[0].dtype, case.expected
    out, (dq, dk, dv) = got
    of_out = limits.attention_limit("out", dtype, method.config).rel_l2
    of_gradient = limits.attention_limit("gradient", dtype, method.config).rel_l2
    return max(
        error_of(out, expected.out[rows]).rel_l2 / of_out,
        error_of(dq, expected.dq[rows]).rel_l2 / of_gradient,
        error_of(dk, expected.dk[tokens]).rel_l2 / of_gradient,
        error_of(dv, expected.dv[tokens]).rel_l2 / of_gradient,
    )


def check_on_threads(
    kinds: Sequence[type[Method]],
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
    config: SplitKVConfig,
) -> dict[str, float]:
    """Each method on a few simulated ranks of one device.

    Returns:
        For each method that can run, its worst error as a share of the limit.
    Raises:
        ValueError: a method is wrong.
    """
    found: dict[str, float] = {}
    for kind in kinds:
        sizes = [n for n in (MAX_GATE_RANKS, 2) if kind.refusal(workload, n) is None]
        if not sizes:
            continue
        case = small_case(kind, workload, sizes[0], dtype)
        method = kind(case.workload, sizes[0], config)

        def body(transport: Transport, method: Method = method, case: Case = case) -> float:
            got = run_part(method, case, transport, device)
            return worst_share(method, case, transport.rank, got)

        found[kind.name] = max(ThreadGroup(sizes[0], device=device).run(body))
        refuse_wrong(kind.name, found[kind.name])
    return found


def refuse_wrong(name: str, share: float) -> None:
    """Stops a benchmark of a wrong result.

    Raises:
        ValueError: the share of the limit is above one, or not a number.
    """
    if not share <= 1.0:
        raise ValueError(
            f"{name} differs from dense fp64 attention by {share:.3g} times the limit; it is not "
            "timed: python -m megatron_splitkv.verify says more"
        )
