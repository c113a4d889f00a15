"""Many results, few lines: the worst case of each quantity."""

from collections.abc import Iterator

from torch import Tensor

from megatron_splitkv.checks.limits import Limit
from megatron_splitkv.checks.oracle import error_of
from megatron_splitkv.checks.table import Check


class Worst:
    """The worst case of each quantity, by rel-L2, and of all by row."""

    def __init__(self, section: str) -> None:
        """Starts empty; `section` is that of the lines it will give."""
        self.section = section
        self._norms: dict[str, tuple[float, float, str]] = {}
        self._row = (0.0, "")

    def see(self, name: str, case: object, got: Tensor, expected: Tensor, limit: Limit) -> None:
        """Takes one result."""
        error = error_of(got, expected)
        self._keep(name, error.rel_l2, limit.rel_l2, str(case))
        self._row = max(self._row, (error.worst_row / limit.worst_row, f"{name} of {case}"))

    def see_lse(self, case: object, error: float, limit: float) -> None:
        """Takes one log-sum-exp."""
        self._keep("lse", error, limit, str(case))

    def _keep(self, name: str, value: float, limit: float, case: str) -> None:
        if name not in self._norms or value > self._norms[name][0]:
            self._norms[name] = (value, limit, case)

    def checks(self, note: str) -> Iterator[Check]:
        """One line for each quantity; the note names the case if the line failed."""
        for name, (value, limit, case) in self._norms.items():
            kind = "error / (1 + |lse|)" if name == "lse" else "rel-L2"
            is_ok = value <= limit
            yield Check(
                section=self.section, name=f"{name}, {kind}", value=value, limit=limit,
                note=note if is_ok else case,
            )  # fmt: skip
        share, where = self._row
        yield Check(
            section=self.section, name="worst row / its limit", value=share, limit=1.0,
            note="" if share <= 1.0 else where,
        )  # fmt: skip
