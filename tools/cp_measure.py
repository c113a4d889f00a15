"""Times every method on one workload: in replay on one device, or on real ranks."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cp_gate import refuse_wrong, run_part, small_case, worst_share
from cp_methods import Method, RankInputs, RankPart, SplitKV
from cp_replay import (
    Link,
    Pause,
    Recorder,
    ReplayTransport,
    Trace,
    WaitingTransport,
    bytes_sent,
    compute_ms,
    median_trace,
    simulate,
)
from cp_report import Line
from cp_workloads import Int64Array, Workload
from torch import Tensor

from megatron_splitkv.checks.counting import CountingTransport
from megatron_splitkv.checks.processes import World, gather_from_all
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import SplitKVConfig

WARM_UP_ROUNDS = 1
MAX_TRIES = 4  # of a timed run whose pause was too short; each makes the next pause longer
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What is to be timed.

    Attributes:
        workload: documents, mask and heads.
        kinds: the methods.
        config: settings of split-kv; the wire format of partial sums holds for all methods.
        device: of this process.
        dtype: of q, k, v and dout.
        rounds: timed ones, after one of warm-up.
    """

    workload: Workload
    kinds: Sequence[type[Method]]
    config: SplitKVConfig
    device: torch.device
    dtype: torch.dtype
    rounds: int


class Inputs:
    """Random tensors of the whole workload; each rank takes as many rows as it owns."""

    def __init__(self, m: Measurement, num_rows: int, num_tokens: int) -> None:
        generator = torch.Generator(m.device).manual_seed(0)
        (heads_q, heads_kv), dim = m.workload.heads, m.workload.head_dim

        def normal(rows: int, heads: int) -> Tensor:
            drawn = torch.empty(rows, heads, dim, dtype=m.dtype, device=m.device)
            return drawn.normal_(generator=generator)

        self.q, self.dout = normal(num_rows, heads_q), normal(num_rows, heads_q)
        self.k, self.v = normal(num_tokens, heads_kv), normal(num_tokens, heads_kv)

    def of(self, rows: Sequence[Int64Array], tokens: Sequence[Int64Array], rank: int) -> RankInputs:
        """Views of as many rows as the rank has, another place for each rank."""
        row, token = (sum(map(len, shares[:rank])) for shares in (rows, tokens))
        own = slice(row, row + len(rows[rank]))
        held = slice(token, token + len(tokens[rank]))
        return RankInputs(q=self.q[own], k=self.k[held], v=self.v[held], dout=self.dout[own])


@dataclass
class _Replayed:
    """One rank of one method, and the traces of its runs."""

    part: RankPart
    inputs: RankInputs
    recorder: Recorder
    transport: ReplayTransport | None
    forward: list[Trace] = field(default_factory=list)
    backward: list[Trace] = field(default_factory=list)
    peak_bytes: int = 0

    def run(self, name: str, pause: Pause, is_timed: bool) -> bool:
        """Forward and backward, each behind a pause of its own, until no launch gap is timed.

        Returns:
            Whether that was reached.
        """
        if not is_timed:
            self._step(name, pause, is_timed=False)
            return True
        forward, backward, is_clean = self._step(name, pause, is_timed=True)
        for _ in range(1, MAX_TRIES):
            if is_clean:
                break
            forward, backward, is_clean = self._step(name, pause, is_timed=True)
        self.forward.append(forward)
        self.backward.append(backward)
        return is_clean

    def _step(self, name: str, pause: Pause, *, is_timed: bool) -> tuple[Trace, Trace, bool]:
        """Traces of forward and backward, and whether both pauses were long enough."""
        device = self.inputs.q.device
        is_cuda = device.type == "cuda"
        base = torch.cuda.memory_allocated(device) if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        bodies = (
            lambda: self.part.forward(self.inputs),
            lambda: self.part.backward(self.inputs.dout),
        )
        (forward, is_forward_clean), (backward, is_backward_clean) = (
            self._recorded(f"{name} {way}", pause, body, is_timed)
            for way, body in zip(("fwd", "bwd"), bodies, strict=True)
        )
        if is_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - base
        return forward, backward, is_forward_clean and is_backward_clean

    def _recorded(
        self, name: str, pause: Pause, body: Callable[[], object], is_timed: bool
    ) -> tuple[Trace, bool]:
        def recorded() -> int:
            with self.recorder:
                body()
            return self.recorder.num_calls

        if self.transport is not None:
            self.transport.restart()
        is_clean = pause.run(name, recorded, is_timed=is_timed)
        return self.recorder.trace(), is_clean


def measure_replay(m: Measurement, cp_sizes: Sequence[int], link: Link, say: Say) -> Iterator[Line]:
    """Runs the ranks of each method in turn, all methods in each round.

    Args:
        cp_sizes: numbers of ranks to simulate.
        link: the model of the wire.
        say: told of progress.
    """
    whole = SplitKV(m.workload, 1, m.config)
    inputs = Inputs(m, len(whole.rows[0]), len(whole.tokens[0]))
    programs: dict[tuple[str, int], list[_Replayed]] = {
        ("one rank", 1): _replayed(m, whole, inputs)
    }
    refused: dict[tuple[str, int], str] = {}
    for cp_size in cp_sizes:
        for kind in m.kinds:
            reason = kind.refusal(m.workload, cp_size)
            if reason is not None:
                refused[kind.name, cp_size] = reason
                continue
            method = kind(m.workload, cp_size, m.config)
            programs[kind.name, cp_size] = _replayed(m, method, inputs)
    pause, num_short = Pause(m.device), 0
    for turn in range(WARM_UP_ROUNDS + m.rounds):
        for (name, cp_size), ranks in programs.items():
            say(f"{m.workload.name}: round {turn} of {m.rounds}, {name} cp {cp_size}")
            for rank in ranks:
                num_short += not rank.run(f"{name} {cp_size}", pause, turn >= WARM_UP_ROUNDS)
    if num_short:
        say(f"{m.workload.name}: {num_short} runs outlasted every pause; launch gaps are in")
    alone = sum(_step_compute(programs.pop(("one rank", 1))[0]))
    for cp_size in cp_sizes:
        for kind in m.kinds:
            key = (kind.name, cp_size)
            if key in refused:
                yield Line(workload=m.workload.name, method=kind.name, cp_size=cp_size,
                           mode="replay", note=refused[key])  # fmt: skip
            else:
                yield _replay_line(m, key, programs[key], alone, link)


def _replayed(m: Measurement, method: Method, inputs: Inputs) -> list[_Replayed]:
    """All ranks of a method, ready to run."""
    ranks: list[_Replayed] = []
    for rank in range(method.cp_size):
        recorder = Recorder(m.device)
        transport = (
            ReplayTransport(rank=rank, size=method.cp_size, recorder=recorder)
            if method.cp_size > 1
            else None
        )
        ranks.append(
            _Replayed(
                part=method.part(rank, transport, m.device),
                inputs=inputs.of(method.rows, method.tokens, rank),
                recorder=recorder,
                transport=transport,
            )
        )
    return ranks


def _step_compute(rank: _Replayed) -> tuple[float, float]:
    """Kernels and all else of a step, medians, milliseconds."""
    parts = [compute_ms(median_trace(traces)) for traces in (rank.forward, rank.backward)]
    return sum(kernel for kernel, _ in parts), sum(other for _, other in parts)


def _replay_line(
    m: Measurement, key: tuple[str, int], ranks: Sequence[_Replayed], alone_ms: float, link: Link
) -> Line:
    name, cp_size = key
    forward, backward = (
        [median_trace(getattr(rank, way)) for rank in ranks] for way in ("forward", "backward")
    )
    forward_ms, forward_wire = simulate(forward, link)
    backward_ms, backward_wire = simulate(backward, link)
    kernels, others = zip(*(_step_compute(rank) for rank in ranks), strict=True)
    compute = [kernel + other for kernel, other in zip(kernels, others, strict=True)]
    step_ms = forward_ms + backward_ms
    sent = [sum(map(bytes_sent, pair)) for pair in zip(forward, backward, strict=True)]
    return Line(
        workload=m.workload.name,
        method=name,
        cp_size=cp_size,
        mode="replay",
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        tflops=sum(m.workload.flop()) / cp_size / step_ms * 1e-9,
        ideal_share=alone_ms / cp_size / step_ms,
        compute_share=alone_ms / cp_size / max(compute),
        kernel_imbalance=max(kernels) / statistics.mean(kernels),
        other_share=sum(others) / sum(compute),
        sent_mb=max(sent) * 1e-6,
        wire_ms=forward_wire + backward_wire,
        exposed_ms=step_ms - max(compute),
        peak_gib=_gib(max(rank.peak_bytes for rank in ranks)),
    )


def _gib(count: int) -> float | None:
    return count / 2**30 if count else None


def measure_real(
    m: Measurement, world: World, transport: Transport | None, say: Say
) -> Iterator[Line]:
    """Runs this rank's part of each method beside those of the other processes.

    Raises:
        ValueError: on every rank, when a method is wrong on any.
    """
    # By one process, so that ranks that share a device do not slow down what they are held against.
    alone_ms = max(gather_from_all(_time_alone(m) if world.rank == 0 else 0.0, world))
    case = small_case(m.workload, m.dtype)
    for kind in m.kinds:
        line = Line(workload=m.workload.name, method=kind.name, cp_size=world.size, mode="real")
        reason = kind.refusal(m.workload, world.size)
        if reason is not None:
            yield Line(workload=line.workload, method=line.method, cp_size=line.cp_size,
                       mode=line.mode, note=reason)  # fmt: skip
            continue
        small = kind(case.workload, world.size, m.config)
        got = run_part(small, case, transport, m.device)
        share = worst_share(small, case, world.rank, got)
        refuse_wrong(kind.name, max(gather_from_all(share, world)))
        say(f"{m.workload.name}: {kind.name} is right, timing it")
        yield _real_line(m, kind, world, transport, alone_ms)


def _real_line(
    m: Measurement,
    kind: type[Method],
    world: World,
    transport: Transport | None,
    alone_ms: float,
) -> Line:
    method = kind(m.workload, world.size, m.config)
    recorder = Recorder(m.device)
    counting = None if transport is None else CountingTransport(transport)
    waiting = None if counting is None else WaitingTransport(counting, recorder)
    part = method.part(world.rank, waiting, m.device)
    rows, tokens = method.rows, method.tokens
    inputs = Inputs(m, len(rows[world.rank]), len(tokens[world.rank])).of(
        rows[world.rank : world.rank + 1], tokens[world.rank : world.rank + 1], 0
    )
    is_cuda = m.device.type == "cuda"
    base = torch.cuda.memory_allocated(m.device) if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(m.device)
    rounds: list[tuple[float, float]] = []
    sent = 0
    for _ in range(WARM_UP_ROUNDS + m.rounds):
        before = 0 if counting is None else counting.bytes_sent
        times = [
            _timed(m, world, body)
            for body in (lambda: part.forward(inputs), lambda: part.backward(inputs.dout))
        ]
        sent = 0 if counting is None else counting.bytes_sent - before
        everyone = gather_from_all((times[0], times[1], sent), world)
        rounds.append((max(t[0] for t in everyone), max(t[1] for t in everyone)))
    peak = torch.cuda.max_memory_allocated(m.device) - base if is_cuda else 0
    kernel_ms = _kernel_ms(recorder, part, inputs)
    kernels, peaks, sents = zip(*gather_from_all((kernel_ms, peak, sent), world), strict=True)
    forward_ms, backward_ms = (
        statistics.median(times[way] for times in rounds[WARM_UP_ROUNDS:]) for way in (0, 1)
    )
    step_ms = forward_ms + backward_ms
    return Line(
        workload=m.workload.name,
        method=kind.name,
        cp_size=world.size,
        mode="real",
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        tflops=sum(m.workload.flop()) / world.size / step_ms * 1e-9,
        ideal_share=alone_ms / world.size / step_ms,
        kernel_imbalance=max(kernels) / statistics.mean(kernels),
        sent_mb=max(sents) * 1e-6,
        peak_gib=_gib(max(peaks)),
    )


def _timed(m: Measurement, world: World, body: Callable[[], object]) -> float:
    """Milliseconds of a call that all ranks make at once."""
    recorder = Recorder(m.device)
    gather_from_all(None, world)  # a barrier
    if m.device.type == "cuda":
        torch.cuda.synchronize(m.device)
    return recorder.elapsed_ms(body)


def _kernel_ms(recorder: Recorder, part: RankPart, inputs: RankInputs) -> float:
    """Kernels of one more step, apart, as recording slows the host."""
    total = 0.0
    for body in (lambda: part.forward(inputs), lambda: part.backward(inputs.dout)):
        with recorder:
            body()
        total += compute_ms(recorder.trace())[0]
    return total


def _time_alone(m: Measurement) -> float:
    """A step of the whole workload on this device without other ranks, milliseconds."""
    whole = SplitKV(m.workload, 1, m.config)
    inputs = Inputs(m, len(whole.rows[0]), len(whole.tokens[0])).of(whole.rows, whole.tokens, 0)
    part = whole.part(0, None, m.device)
    recorder = Recorder(m.device)
    steps = [
        recorder.elapsed_ms(lambda: part.forward(inputs))
        + recorder.elapsed_ms(lambda: part.backward(inputs.dout))
        for _ in range(WARM_UP_ROUNDS + m.rounds)
    ]
    return float(np.median(steps[WARM_UP_ROUNDS:]))
