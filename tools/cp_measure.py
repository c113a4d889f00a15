"""Times every method on one workload on real ranks; what replay needs of it too."""

import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from cp_clock import StepClock
from cp_gate import refuse_wrong, run_part, small_case, worst_share
from cp_methods import Method, RankInputs, SplitKV
from cp_replay import Recorder, compute_ms
from cp_report import Line
from cp_transports import SilentTransport, WaitingTransport
from cp_workloads import Int64Array, Workload
from torch import Tensor

from megatron_splitkv.checks.counting import CountingTransport
from megatron_splitkv.checks.processes import World, gather_from_all
from megatron_splitkv.comm import SymmetricTransport, Transport
from megatron_splitkv.config import SplitKVConfig

WARM_UP_ROUNDS = 2  # one that compiles, one that tells how long the host queues
RECORDING_SHARE = 3.0  # of the usual time to queue: a recorder notes each call
MAX_NOTE = 200  # characters of an error that a line quotes
Say = Callable[[str], None]
Step = tuple[float, float]  # forward and backward, milliseconds


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
        is_bare: only the steps, on real ranks: no share of the ideal, no exposed time.
    """

    workload: Workload
    kinds: Sequence[type[Method]]
    config: SplitKVConfig
    device: torch.device
    dtype: torch.dtype
    rounds: int
    is_bare: bool = False


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


def gib(count: int) -> float | None:
    """Bytes in GiB; None for nothing measured."""
    return count / 2**30 if count else None


def measure_real(
    m: Measurement,
    world: World,
    transport: Transport | None,
    say: Say,
    passed: set[object] | None = None,
) -> Iterator[Line]:
    """Runs this rank's part of each method beside those of the other processes, in turn.

    Args:
        transport: of the methods that bring none along.
        passed: small problems that methods got right in this run, added to; large ones of the same
            kind share them.

    A method that fails or is wrong gives a line that says so.
    """
    # By one process, so that ranks that share a device do not slow down what they are held against.
    alone = _Alone(m) if world.rank == 0 and not m.is_bare else None
    passed = set() if passed is None else passed
    parts: dict[str, _RealPart] = {}
    notes: dict[str, str] = {}
    for kind in m.kinds:
        reason = kind.refusal(m.workload, world.size)
        if reason is not None:
            notes[kind.name] = reason
            continue
        with _noted(kind, notes):
            small = (kind.name, replace(kind.small(m.workload, world.size), name=""))
            if small not in passed:
                share = _checked(m, kind, world, kind.transport or transport)
                say(f"{m.workload.name}: {kind.name} is right ({share:.2f} of the limit)")
                passed.add(small)
            parts[kind.name] = _RealPart(m, kind, world, kind.transport or transport)
    alone_ms: list[float] = []
    for turn in range(WARM_UP_ROUNDS + m.rounds):
        say(f"{m.workload.name}: round {turn} of {m.rounds}")
        alone_ms += gather_from_all(0.0 if alone is None else alone.step_ms(), world)[:1]
        # Not always in the same order: a card slows down behind a heavy method.
        names = [name for name in parts if name not in notes]
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            with _noted(parts[name].kind, notes):
                parts[name].measure(is_timed=turn >= WARM_UP_ROUNDS)
    ideal_ms = None
    if not m.is_bare:
        ideal_ms = statistics.median(alone_ms[WARM_UP_ROUNDS:]) / world.size
    for kind in m.kinds:
        if kind.name not in notes:
            with _noted(kind, notes):
                yield parts[kind.name].line(ideal_ms)
        if kind.name in notes:
            say(f"{m.workload.name}: {kind.name}: {notes[kind.name]}")
            yield Line(workload=m.workload.name, method=kind.name, cp_size=world.size,
                       mode="real", note=notes[kind.name])  # fmt: skip


@contextmanager
def _noted(kind: type[Method], notes: dict[str, str]) -> Generator[None]:
    """Writes down why a method failed; a rank that fails alone leaves the others waiting."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        notes[kind.name] = f"{type(error).__name__}: {str(error).partition('\n')[0][:MAX_NOTE]}"


def _checked(
    m: Measurement, kind: type[Method], world: World, transport: Transport | None
) -> float:
    """The worst error of a small problem over all ranks, as a share of its limit.

    Raises:
        ValueError: on every rank, when it is above the limit on any.
    """
    case = small_case(kind, m.workload, world.size, m.dtype)
    small = kind(case.workload, world.size, m.config)
    got = run_part(small, case, transport, m.device)
    share = max(gather_from_all(worst_share(small, case, world.rank, got), world))
    refuse_wrong(kind.name, share)
    return share


class _Alone:
    """The whole workload on one device without other ranks."""

    def __init__(self, m: Measurement) -> None:
        whole = SplitKV(m.workload, 1, m.config)
        inputs = Inputs(m, len(whole.rows[0]), len(whole.tokens[0]))
        self.inputs = inputs.of(whole.rows, whole.tokens, 0)
        self.part = whole.part(0, None, m.device)
        self.clock = StepClock(m.device)

    def step_ms(self) -> float:
        """Milliseconds of forward and backward."""
        bodies = (
            lambda: self.part.forward(self.inputs),
            lambda: self.part.backward(self.inputs.dout),
        )
        return sum(self.clock.times_ms(bodies))


class _RealPart:
    """This rank's part of a method, timed together with those of the other ranks."""

    def __init__(
        self, m: Measurement, kind: type[Method], world: World, transport: Transport | None
    ) -> None:
        method = kind(m.workload, world.size, m.config)
        self.m, self.kind, self.world = m, kind, world
        self.recorder = Recorder(m.device)
        self.clock, self.silent_clock = StepClock(m.device, world), StepClock(m.device, world)
        if isinstance(transport, SymmetricTransport) and kind.is_ours:
            transport = transport.another()  # its buffers count as memory of this method alone
        self.transport = transport
        self.counting = self.silent = None
        if transport is not None:
            self.counting = CountingTransport(transport)
            self.silent = SilentTransport(WaitingTransport(self.counting, self.recorder))
        self.part = method.part(world.rank, self.silent, m.device)
        mine = slice(world.rank, world.rank + 1)
        rows, tokens = method.rows[mine], method.tokens[mine]
        self.inputs = Inputs(m, len(rows[0]), len(tokens[0])).of(rows, tokens, 0)
        self.steps: list[Step] = []
        self.silent_steps: list[Step] = []
        self.sent_bytes = self.peak_bytes = 0
        self.host_ms: list[float] = []
        self.num_gaps = 0

    def measure(self, *, is_timed: bool) -> None:
        """One step, and one that moves nothing between ranks where the method is ours."""
        step = self._measured_step()
        if is_timed:
            self.steps.append(step)
            self.host_ms.append(self.clock.host_ms)
            self.num_gaps += self.clock.has_gaps
        if self.silent is None or not self.kind.is_ours or self.m.is_bare:
            return
        if not is_timed:
            self._step(is_recording=True)
        silent = self._step(is_silent=True)
        if is_timed:
            self.silent_steps.append(silent)

    def line(self, ideal_ms: float | None) -> Line:
        """The figures, worst of all ranks.

        Args:
            ideal_ms: an even share of one device's step, if that was timed.
        """
        host_ms = statistics.median(self.host_ms)
        mine = (self._kernel_ms(), self.peak_bytes, self.sent_bytes, host_ms, self.num_gaps)
        kernels, peaks, sents, hosts, gaps = zip(*gather_from_all(mine, self.world), strict=True)
        forward_ms, backward_ms = _median(self.steps)
        step_ms = forward_ms + backward_ms
        is_ours = self.kind.is_ours
        return Line(
            workload=self.m.workload.name,
            method=self.kind.name,
            cp_size=self.world.size,
            mode="real",
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            tflops=sum(self.m.workload.flop()) / self.world.size / step_ms * 1e-9,
            ideal_share=None if ideal_ms is None else ideal_ms / step_ms,
            kernel_imbalance=max(kernels) / statistics.mean(kernels) if is_ours else None,
            sent_mb=max(sents) * 1e-6 if is_ours else None,
            exposed_ms=step_ms - sum(_median(self.silent_steps)) if self.silent_steps else None,
            peak_gib=gib(max(peaks)),
            host_ms=max(hosts),
            spread=_spread(self.steps),
            note=f"{max(gaps)} of {len(self.steps)} steps wait for the host" if any(gaps) else "",
        )

    def _measured_step(self) -> Step:
        """A step, its bytes and its memory."""
        device, sent = self.m.device, 0 if self.counting is None else self.counting.bytes_sent
        is_cuda = device.type == "cuda"
        base = torch.cuda.memory_allocated(device) if is_cuda else 0
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        step = self._step()
        if is_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated(device) - base
            if isinstance(self.transport, SymmetricTransport) and self.kind.is_ours:
                self.peak_bytes += self.transport.buffer_bytes
        self.sent_bytes = 0 if self.counting is None else self.counting.bytes_sent - sent
        return step

    def _step(self, *, is_recording: bool = False, is_silent: bool = False) -> Step:
        """Forward of the slowest rank, and what is left of the longest step."""
        if self.silent is not None:
            self.silent.restart(is_recording=is_recording, is_silent=is_silent)
        gather_from_all(None, self.world)  # a barrier
        clock = self.silent_clock if is_silent else self.clock
        everyone = gather_from_all(clock.times_ms(self._bodies()), self.world)
        forward_ms = max(times[0] for times in everyone)
        return forward_ms, max(map(sum, everyone)) - forward_ms

    def _kernel_ms(self) -> float:
        """Kernels of one more step, apart, as recording slows the host; 0 if they are not ours."""
        total = 0.0
        if self.kind.is_ours:
            if self.silent is not None:
                self.silent.restart()
            for body in self._bodies():
                with self.recorder:
                    self.clock.pause(RECORDING_SHARE)
                    body()
                total += compute_ms(self.recorder.trace())[0]
        return total

    def _bodies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        return (
            lambda: self.part.forward(self.inputs),
            lambda: self.part.backward(self.inputs.dout),
        )


def _spread(steps: Sequence[Step]) -> float:
    times = [sum(step) for step in steps]
    return (max(times) - min(times)) / statistics.median(times)


def _median(steps: Sequence[Step]) -> Step:
    return (
        statistics.median(forward for forward, _ in steps),
        statistics.median(backward for _, backward in steps),
    )
