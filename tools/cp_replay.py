"""Replay: the ranks of a group one after the other on one device, and a model of the wire.

Each rank runs its real part on a `ReplayTransport`, which makes up the rows that others would have
sent: of the right number, from the rank's own rows. What a rank computes is thus measured, with its
real layout. What it would wait for is modelled:

- a collective takes `alpha` plus the bytes of the busiest rank over the rate of its links: bytes to
  ranks of its host over the fast link and the others over the network, both at once;
- what all ranks get alike (`all_gather`) crosses to each other host once, a share by each of its
  ranks, and is passed on inside the host; other rows go straight from rank to rank;
- it starts when every rank has come to it and the one before is over;
- it runs beside compute and does not slow it down.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_splitkv.comm import Counts, Pending, empty_rows
from megatron_splitkv.ops.native import OP_NAMESPACE

KERNELS = "kernel"  # partial attention and its backward
OTHERS = "other"  # merging, packing, converting: all else that runs
MADE_UP = "made up"  # rows of other ranks, which no real rank would make
_KERNEL_NAMES = (
    f"{OP_NAMESPACE}::partial_attention_",
    f"{OP_NAMESPACE}::partial_attention_backward_",
)
PAUSE_SHARE = 1.3  # of the time that the host took to queue the same work before
S_PER_CALL = 80e-6  # of the host, for one torch call that is written down
CYCLES_PER_S = 1.9e9  # no card counts faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the wire is taken to do.

    Attributes:
        alpha_us: latency of a collective, microseconds.
        host_gbs: GB/s of a rank to the ranks of its host, in each direction.
        network_gbs: GB/s of a rank to other hosts, in each direction.
        host_size: ranks of a host.
    """

    alpha_us: float
    host_gbs: float
    network_gbs: float
    host_size: int

    def collective_ms(self, sent: Sequence[Sequence[int]], *, is_all_gather: bool = False) -> float:
        """Duration of one collective.

        Args:
            sent: bytes from each rank to each other one, `[size, size]`.
            is_all_gather: a rank gives the same bytes to all others.
        """
        size = len(sent)
        slowest = 0.0
        for rank in range(size):
            near, far = [0, 0], [0, 0]
            for peer in range(size):
                if peer != rank:
                    is_near = peer // self.host_size == rank // self.host_size
                    to_add = near if is_near else far
                    to_add[0] += sent[rank][peer]
                    to_add[1] += sent[peer][rank]
            if is_all_gather:  # every rank of a host fetches a share of the other hosts' rows
                host = range(size)[rank // self.host_size * self.host_size :][: self.host_size]
                near = [near[0] + far[0], near[1] + far[1]]
                far = [far[0] / len(host), far[1] / len(host)]
            ms = max(max(near) / self.host_gbs, max(far) / self.network_gbs) * 1e-6
            slowest = max(slowest, ms)
        return self.alpha_us * 1e-3 + slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Compute between two points of a rank's program, milliseconds.

    Attributes:
        kernel_ms: partial attention or its backward.
        other_ms: all else.
        rows: query rows that the kernels took.
    """

    kernel_ms: float
    other_ms: float
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A collective is started; `bytes_to` each rank, in an all_gather the same bytes."""

    bytes_to: tuple[int, ...]
    is_all_gather: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The result of the collective of that number is needed."""

    index: int


Trace = list[Work | Start | Wait]


class Recorder(TorchDispatchMode):
    """Writes down, in order, what a rank computes and when it starts and awaits collectives.

    On a GPU the times are those between events, so the work must be queued behind a pause: a
    device that waits for the host would be measured waiting.

    Attributes:
        num_calls: torch calls since it was entered.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._kind = OTHERS
        self.num_calls = 0
        self._marks: list[tuple[Any, str | int | Start | Wait]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Runs one torch call; where kernels begin and end is a mark."""
        self.num_calls += 1
        is_kernel = func.name().partition(".")[0] in _KERNEL_NAMES and self._kind != MADE_UP
        if is_kernel:
            self.become(KERNELS)
            self._marks.append((self._marks[-1][0], len(args[0])))  # `[rows, heads, dim]` in both
        result = func(*args, **(kwargs or {}))
        if is_kernel:
            self.become(OTHERS)
        return result

    def become(self, kind: str) -> None:
        """From here on, work is of that kind."""
        if kind != self._kind:
            self._kind = kind
            self._marks.append((self._now(), kind))

    def note(self, what: Start | Wait) -> None:
        """A collective is started or awaited here."""
        self._marks.append((self._now(), what))

    def __enter__(self) -> "Recorder":
        self._kind = OTHERS
        self.num_calls = 0
        self._marks = [(self._now(), OTHERS)]
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        self._marks.append((self._now(), OTHERS))

    def trace(self) -> Trace:
        """What was written down, once the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: Trace = []
        kind, rows = OTHERS, 0
        times = {KERNELS: 0.0, OTHERS: 0.0, MADE_UP: 0.0}

        def close() -> None:
            nonlocal rows
            found.append(Work(kernel_ms=times[KERNELS], other_ms=times[OTHERS], rows=rows))
            times.update(dict.fromkeys(times, 0.0))
            rows = 0

        for (at, what), (until, _) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(what, str):
                kind = what
            elif isinstance(what, int):
                rows += what
            else:
                close()
                found.append(what)
            times[kind] += self._between_ms(at, until)
        close()
        return found

    def elapsed_ms(self, body: Callable[[], object]) -> float:
        """Milliseconds of `body` as a whole, without looking inside."""
        begin = self._now()
        body()
        end = self._now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._between_ms(begin, end)

    def _now(self) -> Any:  # noqa: ANN401
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_ms(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        is_cuda = self._device.type == "cuda"
        return begin.elapsed_time(end) if is_cuda else (end - begin) * 1e3


@dataclass
class ReplayTransport:
    """A rank of a group that is not there.

    Attributes:
        rank, size: its place.
        recorder: told of each collective.
    """

    rank: int
    size: int
    recorder: Recorder
    _count: int = field(default=0, init=False)

    def send_buffer(self, counts: Counts, row_bytes: int, device: torch.device) -> Tensor:
        """See `Transport.send_buffer`."""
        return empty_rows(int(counts[self.rank].sum()), row_bytes, device)

    def exchange(self, rows: Tensor, counts: Counts) -> Pending:
        """See `Transport.exchange`; what is received are own rows."""
        row_bytes = rows.shape[1]
        return self._collective(
            (counts[self.rank] * row_bytes).tolist(),
            lambda: _repeated(rows, int(counts[:, self.rank].sum())),
            is_all_gather=False,
        )

    def all_gather(self, rows: Tensor) -> Pending:
        """See `Transport.all_gather`; what is received are own rows."""
        return self._collective(
            [rows.numel()] * self.size,
            lambda: rows.expand(self.size, *rows.shape).clone(),
            is_all_gather=True,
        )

    def restart(self) -> None:
        """Counts collectives afresh, for another run."""
        self._count = 0

    def _collective(
        self, bytes_to: list[int], receive: Callable[[], Tensor], *, is_all_gather: bool
    ) -> Pending:
        bytes_to[self.rank] = 0
        index, self._count = self._count, self._count + 1
        self.recorder.note(Start(bytes_to=tuple(bytes_to), is_all_gather=is_all_gather))
        self.recorder.become(MADE_UP)
        received = receive()
        self.recorder.become(OTHERS)

        def wait() -> Tensor:
            self.recorder.note(Wait(index=index))
            return received

        return Pending(wait)


def _repeated(rows: Tensor, count: int) -> Tensor:
    """`count` rows, those given over and over; zeros if none were given."""
    if len(rows) == 0:
        return rows.new_zeros(count, rows.shape[1])
    return rows[torch.arange(count, device=rows.device) % len(rows)]


class Pause:
    """Keeps a GPU busy while the host queues work, so that the work is not measured waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    def run(self, name: str, body: Callable[[], int], *, is_timed: bool) -> bool:
        """Queues `body`, which returns how many torch calls it made, behind a pause.

        A run that is not timed gets none, as it also makes work lists; its calls tell how long
        that of the next run of this name must be. A run that outlasts its pause lengthens it.

        Returns:
            Whether the pause lasted until all was queued; else the times have launch gaps in them.
        """
        pause_s = self._seconds.get(name, 0.0)
        if self._device.type == "cuda" and is_timed:
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(int(pause_s * CYCLES_PER_S))  # pyright: ignore[reportPrivateUsage]
        start = time.perf_counter()
        num_calls = body()
        host_s = time.perf_counter() - start
        needed = PAUSE_SHARE * host_s if is_timed else num_calls * S_PER_CALL
        self._seconds[name] = max(pause_s, needed)
        return host_s <= pause_s or self._device.type != "cuda"


def simulate(traces: Sequence[Trace], link: Link) -> tuple[float, float]:
    """When the last rank is done, and how long all collectives take together, milliseconds.

    Raises:
        ValueError: the ranks did not start equally many collectives.
    """
    counts = {sum(isinstance(item, Start) for item in trace) for trace in traces}
    if len(counts) != 1:
        raise ValueError(f"ranks started {sorted(counts)} collectives; all must start the same")
    clocks, places = [0.0] * len(traces), [0] * len(traces)
    started: list[list[tuple[float, Start]]] = [[] for _ in traces]
    finished: list[float] = []
    wire_ms = 0.0
    while any(place < len(trace) for place, trace in zip(places, traces, strict=True)):
        for rank, trace in enumerate(traces):
            while places[rank] < len(trace):
                item = trace[places[rank]]
                if isinstance(item, Work):
                    clocks[rank] += item.kernel_ms + item.other_ms
                elif isinstance(item, Start):
                    started[rank].append((clocks[rank], item))
                elif item.index < len(finished):
                    clocks[rank] = max(clocks[rank], finished[item.index])
                else:
                    break
                places[rank] += 1
        while len(finished) < min(len(starts) for starts in started):
            calls = [starts[len(finished)] for starts in started]
            duration = link.collective_ms(
                [start.bytes_to for _, start in calls], is_all_gather=calls[0][1].is_all_gather
            )
            begin = max([*(at for at, _ in calls), *finished[-1:]])
            finished.append(begin + duration)
            wire_ms += duration
    return max(clocks), wire_ms


def median_trace(traces: Sequence[Trace]) -> Trace:
    """The same program run several times: the median of each stretch of work."""
    merged: Trace = []
    for items in zip(*traces, strict=True):
        works = [item for item in items if isinstance(item, Work)]
        if works:
            merged.append(
                Work(
                    kernel_ms=statistics.median(work.kernel_ms for work in works),
                    other_ms=statistics.median(work.other_ms for work in works),
                    rows=works[0].rows,
                )
            )
        else:
            merged.append(items[0])
    return merged


def compute_ms(trace: Trace) -> tuple[float, float]:
    """Kernels and all other work of a rank."""
    works = [item for item in trace if isinstance(item, Work)]
    return sum(work.kernel_ms for work in works), sum(work.other_ms for work in works)


def bytes_sent(trace: Trace) -> int:
    """Bytes that a rank sends to others."""
    return sum(sum(item.bytes_to) for item in trace if isinstance(item, Start))
