"""Two GPUs, in bf16: bits at any timing, many documents, and ranks that stop."""

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.comm import (
    Counts,
    PassingTransport,
    Pending,
    ProcessGroupTransport,
    Transport,
    transport_of,
)
from megatron_splitkv.config import ROUTES, SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import make_plan
from tests import gloo
from tests.gloo import run_gloo, run_outcomes
from tests.ranks import (
    Heads,
    drift_of_random_steps,
    join_ranks,
    random_inputs,
    run_rank,
    run_simulated,
)
from tests.tolerances import CUDA_BF16

pytestmark = pytest.mark.multi_gpu
each_transport = pytest.mark.parametrize("choice", ["nccl", "symmetric"])

HEADS = Heads(q=4, kv=2, dim_qk=128, dim_v=128)
LATE_S, SHORT_TIMEOUT_S = 20.0, 10.0  # the first call also sets the communicator up
END_S = 40.0


def on_gpus(choice: str, body: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> Any:
    """Runs a body that takes a transport; each rank has a GPU of its own."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(backend="nccl", device_id=device, timeout=timeout)
    transport = transport_of(group, device, choice)
    assert transport is not None
    return body(transport, *arguments)


@dataclass
class DelayedTransport(PassingTransport):
    """Puts random pauses of up to 5 ms before each collective and behind it.

    Attributes:
        draw: how long they are.
        side: if given, the stream that collectives start from, with a pause that nothing else
            waits for; a collective of NCCL may be waited for by another stream than that.
    """

    draw: random.Random
    side: torch.cuda.Stream | None = None

    def pause(self) -> None:
        torch.cuda._sleep(self.draw.randrange(8_000_000))

    def late(self, start: Callable[[], Pending]) -> Pending:
        self.pause()
        if self.side is None:
            pending = start()
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.pause()
                pending = start()

        def finish() -> Tensor:
            rows = pending.wait()
            rows.record_stream(torch.cuda.current_stream())
            self.pause()
            return rows

        return Pending(finish)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        return self.late(lambda: self.inner.exchange(rows, counts))

    def all_gather(self, rows: Tensor) -> Pending:
        return self.late(lambda: self.inner.all_gather(rows))


def hashes_of_repeats(
    transport: Transport, route: str, num_repeats: int, is_delayed: bool
) -> set[str]:
    """Hashes of this rank's results."""
    torch.use_deterministic_algorithms(True)
    plan = make_plan([3000, 1096], 2, route=route)
    inputs = random_inputs(plan, HEADS, torch.bfloat16, seed=22)
    found = set()
    side = torch.cuda.Stream() if isinstance(transport, ProcessGroupTransport) else None
    for repeat in range(num_repeats):
        draw = random.Random(100 * repeat + transport.rank)
        wrapped = DelayedTransport(transport, draw, side) if is_delayed else transport
        digest = hashlib.sha256()
        for part in run_rank(plan, inputs, wrapped, SplitKVConfig(), device="cuda"):
            if part is not None:
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found.add(digest.hexdigest())
    torch.use_deterministic_algorithms(False)
    return found


# A22: one hash, whatever the timing.
@each_transport
@pytest.mark.parametrize("route", ROUTES)
def test_the_same_bits_at_any_timing(choice, route):
    plain = run_gloo(2, on_gpus, choice, hashes_of_repeats, route, 20, False)
    delayed = run_gloo(2, on_gpus, choice, hashes_of_repeats, route, 20, True)
    assert [len(found) for found in plain] == [1, 1]
    assert delayed == plain


@dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """What one rank saw of a layer: bytes, and the error of sampled rows beside fp64."""

    peak_bytes: int
    query_bytes: int
    lse_bytes: int
    rel_l2: float


def sampled_error(out: Tensor, whole: list[Tensor], index: Tensor, starts: Tensor) -> float:
    """Relative L2 of 64 of this rank's causal rows.

    Args:
        out: `[rows, 32, D]` of this rank.
        whole: q, k and v of all tokens.
        index, starts: of each row of this rank its token, and the first token of its document.
    """
    q, k, v = whole
    got, expected = [], []
    for row in torch.linspace(0, len(index) - 1, 64).long().tolist():
        token, start = int(index[row]), int(starts[row])
        keys, values = (x[start : token + 1].double().repeat_interleave(4, dim=1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[token].double(), keys) * q.shape[-1] ** -0.5
        expected.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        got.append(out[row].double())
    error, due = torch.stack(got) - torch.stack(expected), torch.stack(expected)
    return float(error.norm() / due.norm())


def layer_of_documents(transport: Transport, doc_lens: list[int]) -> LayerFigures:
    """Forward and backward of one layer of 32/8 heads, with no host sync after the first."""
    plan = make_plan(doc_lens, transport.size)
    layout = build_layout(plan, transport.rank, num_stages=SplitKVConfig().num_stages)
    starts = torch.tensor([0, *doc_lens]).cumsum(0)[:-1]
    starts = starts.repeat_interleave(torch.tensor(doc_lens))[layout.kv_index]
    context = SplitKVContext(layout=layout.to("cuda"), transport=transport)
    generator = torch.Generator("cuda").manual_seed(24)
    whole = [
        torch.randn(
            plan.num_tokens, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16
        )
        for heads in (32, 8, 8, 32)
    ]
    index = layout.kv_index.cuda()
    q, k, v, dout = (tensor.index_select(0, index).requires_grad_() for tensor in whole)

    def layer() -> tuple[Tensor, Tensor]:
        out, lse = splitkv_attention(q, k, v, context)
        torch.autograd.grad(out, (q, k, v), dout)
        return out.detach(), lse.detach()

    layer()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return LayerFigures(
        peak_bytes=torch.cuda.max_memory_allocated() - before,
        query_bytes=q.nbytes,
        lse_bytes=lse.untyped_storage().nbytes(),
        rel_l2=sampled_error(out, whole[:3], layout.kv_index, starts),
    )


# A24: what a padded [documents, heads, longest] would need is 17 GB.
@each_transport
def test_thousands_of_short_documents_beside_a_long_one(choice):
    doc_lens = [16] * 2048 + [32768] + [16] * 2048
    for figures in run_gloo(2, on_gpus, choice, layer_of_documents, doc_lens):
        print(figures)
        assert figures.lse_bytes <= 2 * 12.6e6
        assert figures.peak_bytes <= 8 * figures.query_bytes
        assert figures.rel_l2 <= CUDA_BF16.rel_l2


def drift_of_one_rank(transport: Transport) -> int:
    """Of this rank's GPU."""
    return drift_of_random_steps(
        lambda plan, inputs, config: run_rank(plan, inputs, transport, config, device="cuda")
    )


@each_transport
def test_random_steps_leave_nothing_behind(choice):
    for drift in run_gloo(2, on_gpus, choice, drift_of_one_rank):
        assert drift < 2**20


def late_rank(transport: Transport, seconds: float) -> list[Tensor | None]:
    """An attention call that rank 1 joins late."""
    torch.use_deterministic_algorithms(True)
    plan = make_plan([700, 300], 2, block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)
    if transport.rank == 1:
        time.sleep(seconds)
    return run_rank(plan, inputs, transport, SplitKVConfig(), device="cuda")


# Long where our own flags are waited for.
@pytest.mark.parametrize(("choice", "seconds"), [("nccl", 2.0), ("symmetric", LATE_S)])
def test_a_rank_that_is_late_changes_nothing(choice, seconds):
    plan = make_plan([700, 300], 2, block_size=64)
    inputs = random_inputs(plan, HEADS, torch.bfloat16)
    got = join_ranks(plan, run_gloo(2, on_gpus, choice, late_rank, seconds))
    assert got.fingerprint() == run_simulated(plan, inputs, device="cuda").fingerprint()


def stopping_rank(choice: str, how: str) -> None:
    """Rank 1 stalls or raises before its second call, under a short timeout.

    torch's watchdog sees the timeout of a collective of NCCL when it is due. It ends the process
    after four times this wait, by default a minute, in which ranks write down what hung.
    """
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"

    def body(transport: Transport) -> None:
        late_rank(transport, 0.0)
        if transport.rank == 1 and how == "raises":
            raise RuntimeError("rank 1 raises")
        late_rank(transport, 10 * END_S)

    on_gpus(choice, body, timeout_s=SHORT_TIMEOUT_S)


@each_transport
@pytest.mark.parametrize(("how", "grace_s"), [("stalls", 1.0), ("raises", END_S)])
def test_a_rank_that_stops_ends_the_other_within_the_timeout(monkeypatch, choice, how, grace_s):
    monkeypatch.setattr(gloo, "GRACE_S", grace_s)  # after the first failure: time for the other
    gloo._close_all()  # the watchdog's settings are those of a process's first group
    start = time.monotonic()
    survivor, stopped = run_outcomes(2, stopping_rank, choice, how, timeout_s=2 * END_S)
    seconds = time.monotonic() - start
    print(f"{how}: after {seconds:.1f} s: {survivor}, {stopped}")
    assert survivor.error is not None, "it hung"
    aborted = f"died with exit code {-signal.SIGABRT}"
    assert aborted in survivor.error or "imed out" in survivor.error, survivor.error
    assert (stopped.error is None) == (how == "stalls"), stopped.error
    assert seconds < END_S
