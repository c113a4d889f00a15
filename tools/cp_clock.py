"""The clock of steps on real ranks: GPUs are timed, not the hosts that queue their work.

A step is queued behind a pause that lasts until the host is done queueing, as in training, where it
runs ahead of the GPU; the ranks then start together, behind a small collective. What the host took
is kept apart. A host that waits for the GPU while it queues outlasts every pause.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from cp_replay import CYCLES_PER_S, PAUSE_SHARE

from megatron_splitkv.checks.processes import World

MAX_PAUSE_S = 0.2  # a first step may compile for seconds


class StepClock:
    """Times the same work again and again; each run sets the pause of the next.

    Attributes:
        host_ms: from the start of queueing the last run until all was queued.
        has_gaps: that outlasted the pause, so that the GPU waited for the host in between.
    """

    def __init__(self, device: torch.device, world: World | None = None) -> None:
        """Takes the device of the rank, and the processes that run the work together."""
        self.host_ms, self.has_gaps = 0.0, False
        self._device = device
        self._pause_s = 0.0
        is_together = world is not None and world.size > 1 and world.backend == "nccl"
        self._token = torch.zeros(1, device=device) if is_together else None

    def times_ms(self, bodies: Sequence[Callable[[], object]]) -> list[float]:
        """Milliseconds of each body, one after the other."""
        if self._device.type != "cuda":
            return self._host_times_ms(bodies)
        torch.cuda.synchronize(self._device)
        self.pause()
        if self._token is not None:
            dist.all_reduce(self._token)
        start = time.perf_counter()
        events = [self._event()]
        for body in bodies:
            body()
            events.append(self._event())
        host_s = time.perf_counter() - start
        self.has_gaps = host_s > self._pause_s
        self._pause_s = min(PAUSE_SHARE * host_s, MAX_PAUSE_S)
        self.host_ms = host_s * 1e3
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def pause(self, share: float = 1.0) -> None:
        """Keeps a GPU busy for that share of the time that the last run suggests."""
        if self._device.type == "cuda":
            cycles = int(share * self._pause_s * CYCLES_PER_S)
            torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateUsage]

    def _host_times_ms(self, bodies: Sequence[Callable[[], object]]) -> list[float]:
        marks = [time.perf_counter()]
        for body in bodies:
            body()
            marks.append(time.perf_counter())
        self.host_ms = (marks[-1] - marks[0]) * 1e3
        return [(b - a) * 1e3 for a, b in pairwise(marks)]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
