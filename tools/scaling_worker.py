"""One rank of `bench_scaling.py`: runs the cases of one group size and writes what is done.

Started by `bench_scaling.py`, on as many processes as the group has ranks.
"""

import json
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cp_baselines import METHODS
from cp_measure import Measurement, measure_real
from cp_peers import PEERS
from cp_report import Line
from scaling_cases import Case, Once, Pace, next_case, once_seconds, still_to_run

from megatron_splitkv.checks.processes import World, cp_transport, gather_from_all, join_world
from megatron_splitkv.comm import Transport
from megatron_splitkv.config import SplitKVConfig

ALL_METHODS = METHODS | PEERS
TIMEOUT_S = 120  # of a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the ranks of one group are to do.

    Attributes:
        device: "auto", "cpu" or "cuda".
        transport: as `SplitKVConfig.transport`, of our methods.
        rounds: timed ones of each method.
        start, deadline: `time.time` when the command began, and when the last case must be done.
        pace: of the groups before.
        cases: what is still to run in any group, those that matter most first.
    """

    device: str
    transport: str
    rounds: int
    start: float
    deadline: float
    pace: Pace
    cases: Sequence[Case]


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written, whoever reads it or ends this process."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def run(job: Job, output: Path, world: World, transport: Transport | None) -> None:
    """Measures case after case, as long as there is one for this group that the time left allows.

    Args:
        job: what to do.
        output: JSON, rewritten after each case by rank 0: the lines so far, and the pace.
        world: the ranks of the group.
        transport: of our methods.
    """
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    lines: list[Line] = []
    passed: set[object] = set()
    pace = job.pace
    paid: set[Once] = {(world.size, "start")}

    def say(text: str) -> None:
        if world.rank == 0:
            elapsed = time.time() - job.start
            print(f"[{elapsed:6.1f} s] cp {world.size}: {text}", file=sys.stderr, flush=True)

    while True:
        begin = time.time()
        # Clocks differ, and all ranks must run the same: what the first rank chooses.
        cases = still_to_run(job.cases, lines)
        mine = next_case(cases, world.size, job.deadline - begin, pace, paid)
        chosen = gather_from_all(mine, world)[0]
        if chosen is None:
            break
        case, seconds = chosen
        measurement = Measurement(
            workload=case.workload, kinds=[ALL_METHODS[x] for x in case.methods],
            config=SplitKVConfig(), device=world.device, dtype=dtype, rounds=job.rounds,
            is_bare=True,
        )  # fmt: skip
        found = list(measure_real(measurement, world, transport, say, passed))
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        took_s = time.time() - begin
        say(f"{case.workload.name}: took {took_s:.1f} s of {seconds:.1f} s set apart")
        step_s = sum(line.step_ms or 0.0 for line in found) * 1e-3
        pace = pace.after(case, paid, took_s, step_s)
        paid |= once_seconds(case).keys()
        lines += found
        if world.rank == 0:
            figures = [{**asdict(line), "step_ms": line.step_ms} for line in lines]
            write_whole(output, json.dumps({"lines": figures, "pace": asdict(pace)}))


def main(argv: Sequence[str] | None = None) -> int:
    """Joins the ranks and runs; the arguments are a file with the job and one to write."""
    job_file, output = map(Path, sys.argv[1:] if argv is None else argv)
    job = pickle.loads(job_file.read_bytes())
    with join_world(device=job.device, backend="auto", timeout_s=TIMEOUT_S) as world:
        run(job, output, world, cp_transport(world, world.size, job.transport))
    return 0


if __name__ == "__main__":
    sys.exit(main())
