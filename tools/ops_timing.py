"""Times calls in turns on one device: CUDA events on a GPU, CPU time of the process elsewhere."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP_ROUNDS = 2
PAUSE_CYCLES = 8_000_000  # 4 ms, longer than it takes to queue a round
# Of a Hopper SM in 16 bits, and the highest clock seen while its tensor cores are busy.
FLOP_PER_CLOCK, CLOCK_GHZ = 4096, 1.63

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One contestant on one shape.

    Attributes:
        shape, op, contestant: what was timed.
        median_ms, min_ms, max_ms: over the rounds.
        rate: TFLOP/s by visible pairs, or TB/s that a merge moves, of the median.
        num_discarded: rounds faster than the GPU can be, left out.
    """

    shape: str
    op: str
    contestant: str
    median_ms: float
    min_ms: float
    max_ms: float
    rate: float
    num_discarded: int


def time_in_turns(calls: Calls, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each call in each round.

    Over as many rounds as there are contestants each is first once and comes once behind every
    other (twice or never for an odd number of them): a kernel that draws much power slows the next.
    On a GPU a round is queued behind a pause, so that no call waits for the host.
    """
    names = list(calls)
    zigzag = [(index + 1) // 2 * (-1) ** (index + 1) for index in range(len(names))]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + WARM_UP_ROUNDS):
        order = [names[(turn + step) % len(names)] for step in zigzag]
        measure = _round_on_gpu if device.type == "cuda" else _round_on_cpu
        for name, ms in measure([(name, calls[name]) for name in order]):
            if turn >= WARM_UP_ROUNDS:
                times[name].append(ms)
    return times


def _round_on_gpu(calls: list[tuple[str, Callable[[], object]]]) -> list[tuple[str, float]]:
    spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda._sleep(PAUSE_CYCLES)  # pyright: ignore[reportPrivateUsage]
    for name, call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        spans.append((name, start, end))
    torch.cuda.synchronize()
    return [(name, start.elapsed_time(end)) for name, start, end in spans]


def _round_on_cpu(calls: list[tuple[str, Callable[[], object]]]) -> list[tuple[str, float]]:
    times: list[tuple[str, float]] = []
    for name, call in calls:
        start = time.process_time()
        call()
        times.append((name, (time.process_time() - start) * 1e3))
    return times


def believable_tflops(device: torch.device) -> float:
    """What no round can exceed: known of Hopper, 880 TFLOP/s with 132 SMs; no bound elsewhere."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return math.inf
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return FLOP_PER_CLOCK * num_sms * CLOCK_GHZ * 1e-3


def lines_of(
    shape: str,
    op: str,
    times: Mapping[str, list[float]],
    amount: float,
    *,
    highest_rate: float = math.inf,
) -> list[Line]:
    """Medians, spreads and rates.

    Args:
        shape, op: for the lines.
        times: ms of each contestant in each round.
        amount: flop or bytes of one call.
        highest_rate: 10^12 of them a second; a faster round is left out.
    Returns:
        A line for each contestant that has a round left.
    """
    lines: list[Line] = []
    for name, all_ms in times.items():
        ms = [x for x in all_ms if amount <= highest_rate * 1e9 * x]
        if not ms:
            continue
        median = statistics.median(ms)
        line = Line(
            shape=shape, op=op, contestant=name, median_ms=median, min_ms=min(ms), max_ms=max(ms),
            rate=amount * 1e-9 / median, num_discarded=len(all_ms) - len(ms),
        )  # fmt: skip
        lines.append(line)
    return lines
