"""Times every method on one workload in replay: all ranks in turn, on one device."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from cp_measure import Inputs, Measurement, Say, gib
from cp_methods import Method, RankInputs, RankPart, SplitKV
from cp_replay import (
    Link,
    Pause,
    Recorder,
    ReplayTransport,
    Trace,
    Work,
    bytes_sent,
    compute_ms,
    median_trace,
    simulate,
)
from cp_report import Line, PassTimes

WARM_UP_ROUNDS = 1
MAX_TRIES = 4  # of a timed run whose pause was too short; each makes the next pause longer


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
            # Another rank first in each round: a card slows down behind the long step of one GPU.
            first = turn * len(ranks) // (WARM_UP_ROUNDS + m.rounds)
            for rank in ranks[first:] + ranks[:first]:
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
        peak_gib=gib(max(rank.peak_bytes for rank in ranks)),
        ranks=tuple((_times(a), _times(b)) for a, b in zip(forward, backward, strict=True)),
    )


def _times(trace: Trace) -> PassTimes:
    works = [item for item in trace if isinstance(item, Work)]
    calls = [work for work in works if work.rows]
    return PassTimes(
        rows=tuple(work.rows for work in calls),
        kernel_ms=tuple(work.kernel_ms for work in calls),
        other_ms=sum(work.other_ms for work in works),
    )
