"""The report of `bench_scaling.py`: tables in Markdown, and a figure."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cp_report import Line
from cp_workloads import workload_of
from ops_report import aligned
from scaling_cases import KINDS, OURS, kind_of, size_name
from scaling_fit import NODE_RANKS, Checked, Fit, Projected, plan_of

# Of ours, what weak scaling is to reach: ranks, and the share of the ideal.
AIM_TOKENS = 65536
AIMS = {8: 0.95, 64: 0.91}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured line beside what it is held against.

    Attributes:
        line: the line.
        kind: of `KINDS`.
        is_weak: whether it is a point of weak scaling.
        tokens_per_rank: context tokens.
        share: an even share of one GPU's best rate, over this step; None if there is no such rate.
        planned_imbalance: largest cost of a rank over the mean, of our plan.
    """

    line: Line
    kind: str
    is_weak: bool
    tokens_per_rank: int
    share: float | None
    planned_imbalance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All there is to tell.

    Attributes:
        rows: what was measured.
        dropped: what the time did not allow, or whose ranks failed, by name.
        fit: the terms of the projection, checked on measured steps.
        projected: larger groups.
        network_gb_per_s: of a rank between their nodes, as it was given.
    """

    rows: Sequence[Row]
    dropped: Sequence[str]
    fit: Fit = field(default_factory=Fit)
    projected: Sequence[Projected] = ()
    network_gb_per_s: float = math.inf


def best_rates(lines: Sequence[Line]) -> dict[str, float]:
    """The best TFLOP/s that ours reached on one rank, for each kind: the ideal."""
    best: dict[str, float] = {}
    for line in lines:
        if line.method == OURS and line.cp_size == 1 and line.tflops is not None:
            kind = kind_of(workload_of(line.workload))
            best[kind] = max(best.get(kind, 0.0), line.tflops)
    return best


def rows_of(lines: Sequence[Line], weak: Container[tuple[str, int]]) -> list[Row]:
    """Every line with its shares.

    Args:
        lines: what was measured.
        weak: workload and ranks of the points of weak scaling.
    """
    best = best_rates(lines)
    rows: list[Row] = []
    for line in lines:
        workload = workload_of(line.workload)
        kind = kind_of(workload)
        planned = None
        if line.method == OURS:
            costs = plan_of(workload, line.cp_size).costs
            planned = max(costs) * len(costs) / sum(costs)
        share = line.tflops / best[kind] if line.tflops is not None and kind in best else None
        rows.append(
            Row(
                line=line,
                kind=kind,
                is_weak=(line.workload, line.cp_size) in weak,
                tokens_per_rank=workload.num_tokens // line.cp_size,
                share=share,
                planned_imbalance=planned,
            )
        )
    return rows


def markdown(report: Report, strong: Sequence[str]) -> str:
    """All tables.

    Args:
        report: what they show.
        strong: names of the workloads of strong scaling.
    """
    rows = report.rows
    parts: list[str] = []
    for kind, about in KINDS.items():
        of_kind = [row for row in rows if row.kind == kind and row.is_weak]
        if of_kind:
            parts.append(f"## Weak scaling, {kind}: {about}\n\n{_weak_table(of_kind)}")
    for name in strong:
        of_name = [row for row in rows if row.line.workload == name]
        if of_name:
            parts.append(f"## Strong scaling, {name}\n\n{_table(of_name)}")
    if report.fit.checked:
        terms, table = _terms(report.fit), _check_table(report.fit.checked)
        parts.append(f"## The projection, checked\n\n{terms}\n\n{table}")
    if report.projected:
        about = (
            f"% of the ideal, on nodes of {NODE_RANKS} ranks with {report.network_gb_per_s:g} GB/s "
            "of each rank between them, as given"
        )
        table = _projection_table(report.projected)
        parts.append(f"## Projected, not measured\n\n{about}\n\n{table}")
    if report.fit.missing:
        parts.append(f"Not projected for want of {report.fit.missing}")
    aims = aims_of(rows, report.projected)
    if aims:
        parts.append("## Beside the aims\n\n" + aligned([["", "aim", "reached", ""], *aims]))
    notes = [
        f"- {row.line.workload}, {row.line.method} at cp {row.line.cp_size}: {row.line.note}"
        for row in rows
        if row.line.note
    ]
    notes += [f"- not run: {name}" for name in report.dropped]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _weak_table(rows: Sequence[Row]) -> str:
    return _table(sorted(rows, key=lambda row: (row.tokens_per_rank, row.line.cp_size)))


def _table(rows: Sequence[Row]) -> str:
    head = [
        "tokens a rank", "cp", "method", "fwd ms", "bwd ms", "TFLOP/s", "% ideal", "best other /",
        "kernel max/mean", "planned", "MB sent", "peak GiB",
    ]  # fmt: skip
    table = [head]
    for row in rows:
        line = row.line
        if line.step_ms is None:
            continue
        others = [
            other.line.step_ms
            for other in rows
            if (other.line.workload, other.line.cp_size) == (line.workload, line.cp_size)
            and other.line.method != line.method
            and other.line.step_ms is not None
        ]
        table.append(
            [
                size_name(row.tokens_per_rank), str(line.cp_size), line.method,
                _text(line.forward_ms, ".3g"), _text(line.backward_ms, ".3g"),
                _text(line.tflops, ".4g"), _percent(row.share),
                _text(min(others) / line.step_ms if others else None, ".2f"),
                _text(line.kernel_imbalance, ".3f"), _text(row.planned_imbalance, ".3f"),
                _text(line.sent_mb, ".1f"), _text(line.peak_gib, ".2f"),
            ]
        )  # fmt: skip
    return aligned(table)


def _terms(fit: Fit) -> str:
    has_link = any(one.is_fitted and one.measured.cp_size > 1 for one in fit.checked)
    pairs = ", ".join(f"{kind} {x.pair_ns:.4g}" for kind, x in fit.calibrations.items())
    any_kind = next(iter(fit.calibrations.values()))
    return (
        f"a pair, ns: {pairs}; a row {any_kind.row_ns:.3g} ns, a run {any_kind.run_ns:.3g} ns, a "
        f"layer {any_kind.base_ns / 1e3:.3g} us; link {any_kind.link_gb_per_s:.4g} GB/s, "
        f"{any_kind.link_latency_us:.3g} us{'' if has_link else ', as given'}; worst error of what "
        "was fitted "
        f"{any_kind.worst_error:.1%}"
    )


def _check_table(checked: Sequence[Checked]) -> str:
    table = [["workload", "cp", "measured ms", "predicted ms", "error", ""]]
    for one in sorted(checked, key=lambda x: (x.measured.cp_size, x.measured.kind)):
        table.append(
            [
                one.measured.name, str(one.measured.cp_size),
                f"{one.measured.step_us / 1e3:.4g}", f"{one.predicted_us / 1e3:.4g}",
                f"{one.error:+.1%}", "fitted" if one.is_fitted else "checked",
            ]
        )  # fmt: skip
    held_out = [abs(one.error) for one in checked if not one.is_fitted]
    worst = f"\n\nworst error of what was not fitted: {max(held_out):.1%}" if held_out else ""
    return aligned(table) + worst


def _projection_table(projected: Sequence[Projected]) -> str:
    sizes = sorted({one.cp_size for one in projected})
    table = [["kind", "tokens a rank", *(f"cp {size}" for size in sizes)]]
    for kind, tokens in dict.fromkeys((one.kind, one.tokens_per_rank) for one in projected):
        share = {
            one.cp_size: one.share
            for one in projected
            if (one.kind, one.tokens_per_rank) == (kind, tokens)
        }
        table.append([kind, size_name(tokens), *(_percent(share.get(size)) for size in sizes)])
    return aligned(table)


def aims_of(rows: Sequence[Row], projected: Sequence[Projected]) -> list[list[str]]:
    """Each aim, what was reached, and whether that is enough; none if no row is of that size."""
    table: list[list[str]] = []
    if not any(row.tokens_per_rank == AIM_TOKENS for row in rows):
        return table
    for kind in KINDS:
        measured = {
            row.line.cp_size: row.share
            for row in rows
            if row.is_weak
            and (row.kind, row.tokens_per_rank, row.line.method) == (kind, AIM_TOKENS, OURS)
        }
        expected = {
            one.cp_size: one.share
            for one in projected
            if (one.kind, one.tokens_per_rank) == (kind, AIM_TOKENS)
        }
        for size, aim in AIMS.items():
            how, share = "measured", measured.get(size)
            if share is None:
                how, share = "projected", expected.get(size)
            reached, verdict = "-", "not established"
            if share is not None:
                reached, verdict = f"{share:.1%} {how}", "reached" if share >= aim else "missed"
            table.append([f"{kind}, 64k tokens a rank, cp {size}", f"{aim:.0%}", reached, verdict])
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def plot(rows: Sequence[Row], projected: Sequence[Projected], path: Path) -> None:
    """Share of the ideal in weak scaling: ours measured and projected, others in grey.

    A kind without a share of ours has no panel; without any there is no figure.
    """
    shown = [row for row in rows if row.is_weak and row.share]
    kinds = [x for x in KINDS if any((row.kind, row.line.method) == (x, OURS) for row in shown)]
    if not kinds:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(kinds), figsize=(5 * len(kinds), 4), sharey=True, squeeze=False
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        _draw(axis, kind, [row for row in shown if row.kind == kind], projected)
    axes[0][0].set_ylabel("% of one GPU's best rate")
    axes[0][-1].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(
    axis: Any,  # noqa: ANN401
    kind: str,
    rows: Sequence[Row],
    projected: Sequence[Projected],
) -> None:
    """One panel, on matplotlib's axes."""
    for index, tokens in enumerate(sorted({row.tokens_per_rank for row in rows})):
        own = sorted(
            (row.line.cp_size, 100 * (row.share or 0.0))
            for row in rows
            if row.tokens_per_rank == tokens and row.line.method == OURS
        )
        ahead = [
            (one.cp_size, 100 * one.share)
            for one in projected
            if (one.kind, one.tokens_per_rank) == (kind, tokens)
        ]
        for points, style, label in (
            (own, "o-", f"{size_name(tokens)} a rank"),
            (ahead, ":", None),
        ):
            if points:
                axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label)
    for row in rows:
        if row.line.method != OURS and row.share:
            axis.plot(row.line.cp_size, 100 * row.share, "x", color="0.6", markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_title(f"{kind}: {KINDS[kind]}", fontsize=9)
    axis.set_xlabel("ranks (dotted: projected; grey: other methods)")
    axis.grid(alpha=0.3)
