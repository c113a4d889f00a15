"""What `bench_scaling.py` runs: workloads by size of the group, and which of them fit the time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cp_measure import WARM_UP_ROUNDS
from cp_peers import PEERS
from cp_workloads import Workload, workload_of

from megatron_splitkv.plan import Suffix

KINDS = {"rows": "few query rows", "causal": "one causal document", "pile": "packed documents"}
OURS = "split-kv"
# What is taken for granted before anything is measured: TFLOP/s of a rank, and seconds: to prepare
# a method on a workload; to start the processes of a group; to import TransformerEngine there, and
# to have it build its first plans for a method and a kind.
ASSUMED_TFLOPS = {"cuda": 480.0, "cpu": 0.05}
PREPARE_S, START_S = 0.4, 15.0
START_PEERS_S, FIRST_PLANS_S = 12.0, 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload on a group of one size.

    Attributes:
        kind: of `KINDS`.
        workload: documents, mask and heads.
        cp_size: ranks.
        methods: what runs it, ours first.
        is_weak: whether it is one of weak scaling; it may be one of strong scaling too.
    """

    kind: str
    workload: Workload
    cp_size: int
    methods: tuple[str, ...]
    is_weak: bool

    @property
    def name(self) -> str:
        """For progress and notes."""
        return f"{self.workload.name} at cp {self.cp_size}"

    @property
    def tokens_per_rank(self) -> int:
        """Context tokens of each rank."""
        return self.workload.num_tokens // self.cp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a case takes.

    Attributes:
        device: "cuda" or "cpu".
        rounds: timed ones; those of warm-up and a look at the kernels come to them.
    """

    device: str
    rounds: int

    def seconds(self, case: Case) -> float:
        """An estimate, for all methods of the case."""
        return len(case.methods) * self.method_seconds(case)

    def method_seconds(self, case: Case) -> float:
        """An estimate for one method of the case, whichever."""
        step_s = sum(case.workload.flop()) / case.cp_size / ASSUMED_TFLOPS[self.device] * 1e-12
        return PREPARE_S + step_s * (WARM_UP_ROUNDS + self.rounds + 1)

    def start_seconds(self, cases: Iterable[Case]) -> float:
        """An estimate of what the cases of one group cost once, however many they are."""
        first = {(case.kind, name) for case in cases for name in case.methods if name in PEERS}
        return START_S + (START_PEERS_S if first else 0.0) + FIRST_PLANS_S * len(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Cases that fit, and what was left out for them, by name."""

    cases: list[Case] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def weak_workload(kind: str, num_tokens: int, num_rows: int) -> Workload:
    """A workload of that many tokens.

    Args:
        kind: of `KINDS`.
        num_tokens: of all ranks together.
        num_rows: query rows of the kind "rows".
    """
    size = size_name(num_tokens)
    return workload_of(
        {"rows": f"{size_name(num_rows)}-{size}", "causal": f"{size}-gqa", "pile": f"pile-{size}"}[
            kind
        ]
    )


def size_name(count: int) -> str:
    """65536 as `64k`."""
    for unit, name in ((1024**2, "m"), (1024, "k")):
        if count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def kind_of(workload: Workload) -> str:
    """Which of `KINDS` a workload is."""
    if isinstance(workload.queries, Suffix):
        return "rows"
    return "pile" if workload.name.startswith("pile") else "causal"


def all_cases(
    cp_sizes: Sequence[int],
    tokens: Sequence[int],
    strong: Sequence[Workload],
    num_rows: int,
    methods: Sequence[str],
) -> list[Case]:
    """Weak scaling of every kind and size, and strong scaling; what is both is run once.

    Args:
        tokens: context tokens of a rank, in weak scaling.
        strong: whole workloads.
        num_rows: query rows of the kind "rows".
        methods: ours, then others, those that matter most first; one rank runs ours alone.
    """
    found: dict[tuple[str, int], Case] = {}
    for cp_size in cp_sizes:
        workloads = [
            weak_workload(kind, count * cp_size, num_rows) for kind in KINDS for count in tokens
        ]
        weak_names = {workload.name for workload in workloads}
        for workload in (*workloads, *strong):
            found[workload.name, cp_size] = Case(
                kind=kind_of(workload),
                workload=workload,
                cp_size=cp_size,
                methods=(OURS,) if cp_size == 1 else tuple(methods),
                is_weak=workload.name in weak_names,
            )
    return list(found.values())


def fit_into(cases: Iterable[Case], budget_s: float, pace: Pace) -> Selection:
    """Drops the dearest until the rest fits: first other methods, the last first, then whole cases.

    Other methods are weighed by seconds over ranks, as the largest group tells most of them.

    Args:
        cases: in any order.
        budget_s: seconds for all of them.
        pace: their estimated times.
    Returns:
        What fits, the shortest first.
    """
    kept = list(cases)
    dropped: list[str] = []

    def is_over() -> bool:
        return sum(map(pace.seconds, kept)) > budget_s

    for case in sorted(kept, key=lambda case: pace.seconds(case) / case.cp_size, reverse=True):
        methods, index = list(case.methods), kept.index(case)
        while len(methods) > 1 and is_over():
            methods.pop()
            kept[index] = replace(case, methods=tuple(methods))
        if others := case.methods[len(methods) :]:
            dropped.append(f"{case.name}: {', '.join(others)}")
    kept.sort(key=pace.seconds)
    while kept and is_over():
        dropped.append(kept.pop().name)
    return Selection(cases=kept, dropped=dropped)
