"""Lines of `bench_cp.py`: figures of one method on one workload, and the table of all."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

WIDTH = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Compute of one rank in one direction, milliseconds.

    Attributes:
        rows: query rows that kernels take between two collectives, in order: of split-kv the own
            ones, then those of each stage.
        kernel_ms: of the kernels there.
        other_ms: all else, over the whole direction.
    """

    rows: tuple[int, ...]
    kernel_ms: tuple[float, ...]
    other_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one method did with one workload; a step is one forward and one backward.

    Attributes:
        workload, method, cp_size: what was run.
        mode: "real", or "replay", where everything that waits for the wire is modelled.
        forward_ms, backward_ms: of the slowest rank, communication included.
        tflops: TFLOP/s of each GPU by visible pairs.
        ideal_share: an even share of one GPU's step over this step.
        compute_share: the same over the compute of the slowest rank, without any waiting; replay.
        kernel_imbalance: largest kernel time of a rank over the mean.
        other_share: merging, packing and converting, as a share of all compute; replay.
        sent_mb: 10^6 bytes that the busiest rank sends in a step.
        wire_ms: all collectives of a step one after the other; replay.
        exposed_ms: the step without the compute of the slowest rank, in replay; the step less the
            same step with nothing sent, in real.
        peak_gib: most memory of a rank above its inputs, buffers of the transport among it; None on
            a CPU.
        host_ms: what the host of the slowest rank took to queue a step; not in it; real.
        spread: longest minus shortest step, as a share of the median; real.
        note: why there are no figures.
        ranks: forward and backward of each rank, for files; replay.
    """

    workload: str
    method: str
    cp_size: int
    mode: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    tflops: float | None = None
    ideal_share: float | None = None
    compute_share: float | None = None
    kernel_imbalance: float | None = None
    other_share: float | None = None
    sent_mb: float | None = None
    wire_ms: float | None = None
    exposed_ms: float | None = None
    peak_gib: float | None = None
    host_ms: float | None = None
    spread: float | None = None
    note: str = ""
    ranks: tuple[tuple[PassTimes, PassTimes], ...] = ()

    @property
    def step_ms(self) -> float | None:
        """Forward and backward."""
        if self.forward_ms is None or self.backward_ms is None:
            return None
        return self.forward_ms + self.backward_ms


PEER_PREFIX = "te-"  # of the methods of TransformerEngine


def over_best_other(line: Line, lines: Sequence[Line], prefix: str = "") -> float | None:
    """Step time of the fastest other method over this one's: above 1 this one is faster.

    Args:
        prefix: of the names of the others.
    """
    others = [
        other.step_ms
        for other in lines
        if (other.workload, other.cp_size) == (line.workload, line.cp_size)
        and other.method.split()[0] != line.method.split()[0]  # nor a variant of it
        and other.method.startswith(prefix)
        and other.step_ms is not None
    ]
    return min(others) / line.step_ms if others and line.step_ms else None


COLUMNS = (
    "workload", "cp", "method", "fwd ms", "bwd ms", "TFLOP/s", "% ideal", "% ideal compute",
    "max/mean", "% other", "MB sent", "wire ms", "exposed", "peak GiB", "host ms", "spread %",
    "best other /", "best TE /",
)  # fmt: skip


def cells(line: Line, lines: Sequence[Line]) -> list[str]:
    """One row of the table."""
    return [
        line.workload, str(line.cp_size), line.method, _text(line.forward_ms, ".3g"),
        _text(line.backward_ms, ".3g"), _text(line.tflops, ".3g"), _percent(line.ideal_share),
        _percent(line.compute_share), _text(line.kernel_imbalance, ".3f"),
        _percent(line.other_share), _text(line.sent_mb, ".1f"), _text(line.wire_ms, ".3g"),
        _text(line.exposed_ms, ".3g"), _text(line.peak_gib, ".2f"),
        _text(line.host_ms, ".3g"),
        _percent(line.spread),
        _text(over_best_other(line, lines), ".2f"),
        _text(over_best_other(line, lines, PEER_PREFIX), ".2f"),
    ]  # fmt: skip


def print_lines(lines: Sequence[Line], caption: str) -> None:
    """The table; a section for each workload and number of ranks."""
    table = Table(*COLUMNS, caption=caption, caption_justify="left")
    for column in table.columns[3:]:
        column.justify = "right"
    group = None
    for line in lines:
        if (line.workload, line.cp_size) != group:
            group = (line.workload, line.cp_size)
            table.add_section()
        table.add_row(*cells(line, lines))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(table)
    for note in notes(lines):
        console.print(note)


def notes(lines: Sequence[Line]) -> list[str]:
    """Which lines have no figures, and why."""
    return [f"{x.workload}, {x.method} at cp {x.cp_size}: {x.note}" for x in lines if x.note]


def markdown(lines: Sequence[Line]) -> str:
    """The same table for a results file, and the notes below it."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [cells(line, lines) for line in lines]
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*table, *(f"\n{note}" for note in notes(lines))])


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
