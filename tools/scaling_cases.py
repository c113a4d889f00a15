"""What `bench_scaling.py` runs: workloads by size of the group, and which of them fit the time."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cp_measure import WARM_UP_ROUNDS
from cp_peers import PEERS
from cp_report import Line
from cp_workloads import Workload, workload_of

from megatron_splitkv.plan import Suffix

KINDS = {"rows": "few query rows", "causal": "one causal document", "pile": "packed documents"}
OURS = "split-kv"
LEAST, ALONE = 0, 1  # levels: ours on each kind in every group; all else on one rank
# What is taken for granted before anything is measured: TFLOP/s of a rank, and seconds, as on two
# H200: to start and end the processes of a group, and what its first workload takes longer; to
# import TransformerEngine there, and to have a method of it build its first plans; to prepare a
# method on a workload.
ASSUMED_TFLOPS = {"cuda": 480.0, "cpu": 0.05}
START_S, END_S, WARM_UP_S = 6.5, 4.0, 2.0
START_PEERS_S, FIRST_PLANS_S = 7.0, 4.5
PREPARE_S = 0.6
MORE_ROUNDS = 1  # beyond warm-up and timed ones: a look at the kernels
# What is taken for granted weighs as much as so many measured seconds.
PRIOR_FIXED_S, PRIOR_STEPS_S = 10.0, 2.0
MARGIN = 1.25  # of every estimate, as a case that is started should end

type Once = tuple[int, str]  # ranks, and what is paid once there: a step of the start, or a peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload on a group of one size.

    Attributes:
        level: how much it matters, `LEAST` most.
        kind: of `KINDS`.
        workload: documents, mask and heads.
        cp_size: ranks.
        methods: what is to run; ours runs beside others even if it has run before.
        is_weak: whether it is one of weak scaling; it may be one of strong scaling too.
    """

    level: int
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
    """How long cases take, by what is taken for granted and by the cases before.

    Attributes:
        rounds: timed ones.
        tflops: of a rank, as taken for granted.
        fixed_s, expected_fixed_s: seconds of cases apart from their steps, and their estimates; of
            cases alone that paid nothing once.
        steps_s, expected_steps_s: the same of their steps.
    """

    rounds: int
    tflops: float
    fixed_s: float = PRIOR_FIXED_S
    expected_fixed_s: float = PRIOR_FIXED_S
    steps_s: float = PRIOR_STEPS_S
    expected_steps_s: float = PRIOR_STEPS_S

    def seconds(self, case: Case, paid: Collection[Once] = ()) -> float:
        """An estimate with a margin, for all methods of the case.

        Args:
            paid: what the group need not pay any more.
        """
        once_s = sum(price for key, price in once_seconds(case).items() if key not in paid)
        fixed_s = _prepare(case) * self.fixed_s / self.expected_fixed_s
        steps_s = self._steps(case) * self.steps_s / self.expected_steps_s
        return MARGIN * (once_s + fixed_s + steps_s)

    def after(self, case: Case, paid: Collection[Once], took_s: float, step_s: float) -> "Pace":
        """What a case that is done tells of the others.

        Args:
            case: with the methods that ran.
            paid: before it.
            took_s: all of it.
            step_s: a step of each method, together.
        """
        steps_s = min(took_s, step_s * self._num_rounds)
        is_like_others = once_seconds(case).keys() <= set(paid)
        return replace(
            self,
            fixed_s=self.fixed_s + is_like_others * (took_s - steps_s),
            expected_fixed_s=self.expected_fixed_s + is_like_others * _prepare(case),
            steps_s=self.steps_s + steps_s,
            expected_steps_s=self.expected_steps_s + self._steps(case),
        )

    @property
    def _num_rounds(self) -> int:
        return WARM_UP_ROUNDS + self.rounds + MORE_ROUNDS

    def _steps(self, case: Case) -> float:
        """Seconds of all steps, as taken for granted."""
        step_s = sum(case.workload.flop()) / case.cp_size / self.tflops * 1e-12
        return len(case.methods) * step_s * self._num_rounds


def once_seconds(case: Case) -> dict[Once, float]:
    """What the group pays once, be it for this case or for one before."""
    peers = [name for name in case.methods if name in PEERS]
    prices = {"start": START_S + END_S, "warm-up": WARM_UP_S}
    prices |= {"import": START_PEERS_S} if peers else {}
    prices |= dict.fromkeys(peers, FIRST_PLANS_S)
    return {(case.cp_size, name): price for name, price in prices.items()}


def _prepare(case: Case) -> float:
    """What is taken for granted of a case apart from its steps and what is paid once."""
    return PREPARE_S * len(case.methods)


def choose(
    cases: Sequence[Case], budget_s: float, pace: Pace, paid: Collection[Once] = ()
) -> tuple[list[Case], list[float]]:
    """Cases that fit the time, with as many of their methods, those that matter most first.

    A level goes before the next, and in it our method on all cases before others.

    Args:
        cases: those that matter most first.
        budget_s: seconds for all of them.
        pace: their estimated times.
        paid: what need not be paid any more, as groups run already.
    Returns:
        What fits, in the order of running and ours with it, and the estimated seconds of each.
    """
    have_paid = set(paid)
    methods: list[list[str]] = [[] for _ in cases]
    seconds = [0.0 for _ in cases]
    # Counted from the last method, as those that have run are no longer there.
    units = [
        (case.level, place - len(case.methods), idx, name)
        for idx, case in enumerate(cases)
        for place, name in enumerate(case.methods)
    ]
    for _, _, idx, name in sorted(units):
        if not methods[idx] and name != OURS and OURS in cases[idx].methods:
            continue
        more = [name] if methods[idx] or name == OURS else [OURS, name]
        unit = replace(cases[idx], methods=tuple(more))
        unit_s = pace.seconds(unit, have_paid)
        if unit_s <= budget_s:
            budget_s -= unit_s
            have_paid |= once_seconds(unit).keys()
            methods[idx] += more
            seconds[idx] += unit_s
    kept = [idx for idx, _ in enumerate(cases) if methods[idx]]
    kept.sort(key=lambda idx: cases[idx].level)
    chosen = [replace(cases[idx], methods=tuple(methods[idx])) for idx in kept]
    return chosen, [seconds[idx] for idx in kept]


def next_case(
    cases: Sequence[Case], cp_size: int, budget_s: float, pace: Pace, paid: Collection[Once]
) -> tuple[Case, float] | None:
    """What a group that is up runs next, of all that is still to run in any group.

    While another group has the least to do, one rank alone goes on beyond its own: what is left
    there is cheap, and a second start is not.

    Returns:
        A case and its estimated seconds; None if others come first, or nothing fits.
    """
    chosen = list(zip(*choose(cases, budget_s, pace, paid), strict=True))
    others_wait = any(case.level == LEAST and case.cp_size != cp_size for case, _ in chosen)
    last = ALONE if others_wait else math.inf
    return next((x for x in chosen if x[0].cp_size == cp_size and x[0].level <= last), None)


def still_to_run(cases: Iterable[Case], lines: Iterable[Line]) -> list[Case]:
    """The cases with those of their methods that have no line."""
    ran = {(line.workload, line.cp_size, line.method) for line in lines}
    left = [
        replace(case, methods=tuple(
            x for x in case.methods if (case.workload.name, case.cp_size, x) not in ran
        ))
        for case in cases
    ]  # fmt: skip
    return [case for case in left if case.methods]


def left_out(cases: Iterable[Case], lines: Iterable[Line]) -> list[str]:
    """Names of cases without a line of ours, and of other methods that cases have none of."""
    names: dict[str, str] = {}
    for case in still_to_run(cases, lines):
        others = "" if OURS in case.methods else f": {', '.join(case.methods)}"
        names.setdefault(case.name, case.name + others)
    return list(names.values())


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

    First comes what a report cannot do without: ours on every kind at the first size, in every
    group, then the rest of one rank, on which shares and fit rest. Other methods follow.

    Args:
        tokens: context tokens of a rank, in weak scaling; the first matter most, then `strong`.
        strong: whole workloads.
        num_rows: query rows of the kind "rows".
        methods: ours, then others, those that matter most first; one rank runs ours alone.
    """
    found: list[Case] = []
    for cp_size in sorted(set(cp_sizes)):
        others = () if cp_size == 1 else tuple(name for name in methods if name != OURS)
        seen: set[tuple[str, str]] = set()
        weak = [[weak_workload(kind, count * cp_size, num_rows) for kind in KINDS]
                for count in tokens]  # fmt: skip
        weak_names = {workload.name for workloads in weak for workload in workloads}
        later = [(workloads, (OURS, *others)) for workloads in (strong, *weak[1:])]
        levels = [(weak[0], (OURS,)), (weak[0], others), *later]
        for idx, (workloads, names) in enumerate(levels):
            for workload in workloads:
                new = tuple(name for name in names if (workload.name, name) not in seen)
                seen |= {(workload.name, name) for name in new}
                if new:
                    case = Case(
                        level=LEAST if idx == 0 else ALONE if cp_size == 1 else ALONE + idx,
                        kind=kind_of(workload),
                        workload=workload,
                        cp_size=cp_size,
                        methods=new,
                        is_weak=workload.name in weak_names,
                    )
                    found.append(case)
    return found
