"""`Check`: one figure beside its limit; and the table that a user reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Bound = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the table.

    Attributes:
        section: what it belongs to.
        name: what was looked at.
        value: what was found.
        limit: what is still right.
        bound: whether `value` may be at most or at least `limit`.
        note: what a reader should know, above all after a failure.
    """

    section: str
    name: str
    value: float
    limit: float
    bound: Bound = "at most"
    note: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the value keeps its limit; NaN never does."""
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit

    @property
    def badness(self) -> float:
        """Grows with how near the value is to its limit, and beyond it; NaN counts as infinite."""
        if self.value != self.value:
            return float("inf")
        excess = self.value - self.limit
        return excess if self.bound == "at most" else -excess


def failed(section: str, name: str, note: str) -> Check:
    """A check that could not be made: it fails, and says why."""
    return Check(section=section, name=name, value=float("nan"), limit=0.0, note=note)


def worst_of_ranks(checks_of_ranks: Sequence[Sequence[Check]]) -> list[Check]:
    """For each check the value of the worst rank, which the note names if it failed.

    Raises:
        ValueError: the ranks made different checks.
    """
    names = [[(check.section, check.name) for check in checks] for checks in checks_of_ranks]
    if any(other != names[0] for other in names):
        counts = ", ".join(str(len(checks)) for checks in checks_of_ranks)
        raise ValueError(
            f"the ranks made different checks ({counts} each); start all of them with the same "
            "options and the same build"
        )
    worst: list[Check] = []
    for same in zip(*checks_of_ranks, strict=True):
        rank, check = max(enumerate(same), key=lambda item: item[1].badness)
        if not check.is_ok and len(same) > 1:
            note = f"rank {rank}" + (f": {check.note}" if check.note else "")
            check = Check(
                section=check.section, name=check.name, value=check.value, limit=check.limit,
                bound=check.bound, note=note,
            )  # fmt: skip
        worst.append(check)
    return worst


def print_checks(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints all checks as one table, and a last line that counts the failures."""
    table = Table("check", "value", "limit", "pass", "note", title=title, title_justify="left")
    for index in (1, 2):
        table.columns[index].justify = "right"
    section = None
    for check in checks:
        if check.section != section:
            section = check.section
            table.add_section()
            table.add_row(f"[bold]{section}[/bold]")
        sign = "<=" if check.bound == "at most" else ">="
        passed = "[green]yes[/green]" if check.is_ok else "[bold red]NO[/bold red]"
        table.add_row(
            f"  {check.name}",
            f"{check.value:.3g}",
            f"{sign} {check.limit:.3g}",
            passed,
            escape(check.note),
        )
    console.print(table)
    failures = [check for check in checks if not check.is_ok]
    if failures:
        names = "; ".join(f"{check.section}: {check.name}" for check in failures)
        console.print(f"[bold red]FAILED[/bold red] {len(failures)} of {len(checks)}: {names}")
    else:
        console.print(f"all {len(checks)} checks passed")
