"""The report of `bench_ops.py`: a table for each op, and the speeds beside the aims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops_shapes import AIMS, SHAPES, Aim
from ops_timing import Line

OPS = ("forward", "backward", "merge")
OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """An aim beside what was measured.

    Attributes:
        aim: what was to be reached.
        by: the contestant that the aim came down to, or the unit.
        value: the ratio or the rate of "ours"; None where this run did not measure it.
    """

    aim: Aim
    by: str
    value: float | None

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.value is None:
            return "not measured"
        return "reached" if self.value >= self.aim.at_least else "missed"


def beside_aims(lines: Sequence[Line]) -> list[Reached]:
    """Every aim of a shape that was timed."""
    found = {(line.shape, line.op, line.contestant): line for line in lines}
    timed = {(line.shape, line.op) for line in lines}
    return [_reached(aim, found) for aim in AIMS if (aim.shape, aim.op) in timed]


def _reached(aim: Aim, found: Mapping[tuple[str, str, str], Line]) -> Reached:
    ours = found.get((aim.shape, aim.op, OURS))
    if aim.of == "TFLOP/s":
        return Reached(aim=aim, by=aim.of, value=ours and ours.rate)
    if aim.of in SHAPES:
        other = found.get((aim.of, aim.op, OURS))
    elif aim.of == "library":
        others = [
            line
            for (shape, op, name), line in found.items()
            if (shape, op) == (aim.shape, aim.op) and not name.startswith(OURS)
        ]
        other = min(others, key=lambda line: line.median_ms, default=None)
    else:
        other = found.get((aim.shape, aim.op, aim.of))
    by = other.contestant if other is not None and aim.of == "library" else aim.of
    return Reached(aim=aim, by=by, value=ours and other and ours.rate / other.rate)


def markdown(lines: Sequence[Line], notes: Sequence[str], device: str) -> str:
    """All tables; cells are `ms, median (min - max) / rate`.

    Args:
        lines: what was timed.
        notes: who did not run what, and why.
        device: "cuda" or "cpu", for the unit.
    """
    parts: list[str] = []
    for op in OPS:
        of_op = [line for line in lines if line.op == op]
        if of_op:
            parts.append(_op_table(op, of_op, device))
    reached = beside_aims(lines)
    if reached:
        rows = [["shape", "op", "aim", "reached", ""]]
        for r in reached:
            unit = " TFLOP/s" if r.aim.of == "TFLOP/s" else f"x {r.by}"
            value = "-" if r.value is None else f"{r.value:.3g}{unit}"
            rows.append([r.aim.shape, r.aim.op, f"{r.aim.at_least:g}{unit}", value, r.verdict])
        parts.append("## Beside the aims\n\n" + aligned(rows))
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _op_table(op: str, lines: Sequence[Line], device: str) -> str:
    names = list(dict.fromkeys(line.contestant for line in lines))
    others = [name for name in names if not name.startswith(OURS)]
    head = ["shape", "", *names, *(f"{name} / ours" for name in others)]
    rows = [head]
    for shape in dict.fromkeys(line.shape for line in lines):
        by_name = {line.contestant: line for line in lines if line.shape == shape}
        about = SHAPES[shape].about if shape in SHAPES else ""
        cells = [_cell(by_name.get(name), device) for name in names]
        ratios = [_ratio(by_name.get(name), by_name.get(OURS)) for name in others]
        rows.append([shape, about, *cells, *ratios])
    unit = {"merge": "TB/s"}.get(op, "TFLOP/s by visible pairs")
    unit = unit if device == "cuda" else unit.replace("T", "G", 1) + " per core"
    return f"## {op}\n\nms, median (min - max) / {unit}\n\n{aligned(rows)}"


def _cell(line: Line | None, device: str) -> str:
    if line is None:
        return "-"
    rate = line.rate if device == "cuda" else line.rate * 1e3
    span = f"{line.median_ms:.3f} ({line.min_ms:.3f} - {line.max_ms:.3f})"
    return f"{span} / {rate:.3g}" + (f", {line.num_discarded} left out" * (line.num_discarded > 0))


def _ratio(other: Line | None, ours: Line | None) -> str:
    if other is None or ours is None:
        return "-"
    return f"{other.median_ms / ours.median_ms:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head, *body = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )
    rule = "| " + " | ".join("-" * max(width, 3) for width in widths) + " |"
    return "\n".join([head, rule, *body])
