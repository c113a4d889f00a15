"""The numerics contract: ranks add no error, and runs repeat to the bit."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_splitkv.checks import limits
from megatron_splitkv.checks.attention_checks import AttentionCase, RankCall, attention_cases
from megatron_splitkv.checks.op_checks import dtypes_of
from megatron_splitkv.checks.oracle import error_of
from megatron_splitkv.checks.table import Check
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import SplitKVConfig

NUM_RUNS = 3


def check_contract(
    device: torch.device, transport: Transport | None, config: SplitKVConfig
) -> list[Check]:
    """Error beside that of one rank in each 16-bit dtype, and bits of repeated runs, by each route.

    Args:
        device: where the tensors of this rank are.
        transport: the context-parallel group; None for one rank.
        config: settings, as a run would have them.
    """
    cases = [case for case in attention_cases() if case.name.startswith("one document, causal")]
    checks: list[Check] = []
    for dtype in dtypes_of(device):
        # A wire that is coarser than the result is a choice, and its error no surprise.
        formats = (limits.DTYPE_NAMES[dtype], "fp32", "fp16")
        is_fine = config.resolved_partial_dtype(formats[0]) in formats
        if transport is not None and dtype.itemsize == 2 and is_fine:
            for case in cases:
                checks += _check_growth(case, dtype, device, transport, config)
    return [*checks, *(_check_repeats(case, device, transport, config) for case in cases)]


def _check_growth(
    case: AttentionCase,
    dtype: torch.dtype,
    device: torch.device,
    transport: Transport,
    config: SplitKVConfig,
) -> list[Check]:
    """Errors of what travels in parts, in the group over alone: out and dq, or dk and dv."""
    call = RankCall(case, dtype, device, transport, config)
    alone = RankCall(case, dtype, device, None, config)
    rows = call.rows  # of queries and of keys alike: each token is both
    due, got, one_rank = (
        dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
        for out, _, gradients in (call.expected, call.run(), alone.run())
    )
    name = limits.DTYPE_NAMES[dtype]
    partial_dtype = config.resolved_partial_dtype(name)
    return [
        Check(
            section="numerics contract", name=f"error of {what} in {name} / that of one rank",
            value=_norm_of_error(got[what], due[what][rows])
            / _norm_of_error(one_rank[what].cpu()[rows], due[what][rows]),
            limit=limits.GROWTH[partial_dtype],
            note=f"{case.route} travel, partials in {partial_dtype}",
        )
        for what in (("dk", "dv") if case.route == "keys" else ("out", "dq"))
    ]  # fmt: skip


def _norm_of_error(got: Tensor, expected: Tensor) -> float:
    return error_of(got, expected).rel_l2


def _check_repeats(
    case: AttentionCase,
    device: torch.device,
    transport: Transport | None,
    config: SplitKVConfig,
) -> Check:
    """Under torch's deterministic algorithms nothing may differ from run to run."""
    num_different = 0
    with _deterministic():
        call = RankCall(case, dtypes_of(device)[0], device, transport, config)
        first, *others = [_flat(call) for _ in range(NUM_RUNS)]
        for other in others:
            num_different += int((first != other).sum())
    return Check(
        section="numerics contract",
        name=f"numbers that differ between runs, {case.route} travel", value=num_different,
        limit=0, note=f"{NUM_RUNS} runs, out, lse and gradients, deterministic algorithms",
    )  # fmt: skip


def _flat(call: RankCall) -> Tensor:
    """All results of a call, one after the other, on the CPU."""
    out, lse, gradients = call.run()
    return torch.cat([result.cpu().float().flatten() for result in (out, lse, *gradients)])


@contextmanager
def _deterministic() -> Generator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
