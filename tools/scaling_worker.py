"""One rank of `bench_scaling.py`: runs the cases of one group size and writes what is done.

Started by `bench_scaling.py`, on as many processes as the group has ranks.
"""

import json
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
from cp_workloads import workload_of

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
        start, deadline: `time.time` when the command began, and when this group must be done.
        cases: name of the workload, methods, estimated seconds of each method; in the order of
            running.
    """

    device: str
    transport: str
    rounds: int
    start: float
    deadline: float
    cases: list[tuple[str, list[str], float]]

    def to_json(self) -> str:
        """What `job_from_json` reads."""
        return json.dumps(asdict(self))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written, whoever reads it or ends this process."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def job_from_json(text: str) -> Job:
    """Reads what `Job.to_json` wrote."""
    return Job(**json.loads(text))


def run(job: Job, output: Path, world: World, transport: Transport | None) -> None:
    """Measures case after case; methods that would pass the deadline are dropped by name.

    Args:
        job: what to do.
        output: JSON, rewritten after each case by rank 0: the lines so far, and what was dropped.
        world: the ranks of the group.
        transport: of our methods.
    """
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    lines: list[Line] = []
    dropped: list[str] = []
    passed: set[object] = set()

    def say(text: str) -> None:
        if world.rank == 0:
            elapsed = time.time() - job.start
            print(f"[{elapsed:6.1f} s] cp {world.size}: {text}", file=sys.stderr, flush=True)

    for name, methods, seconds in job.cases:
        left = min(gather_from_all(job.deadline - time.time(), world))
        fitting = max(0, int(left / seconds))
        if methods[fitting:]:
            others = f": {', '.join(methods[fitting:])}" if fitting else ""
            dropped.append(f"{name} at cp {world.size}{others}")
            say(f"{dropped[-1]}: dropped, {seconds:.0f} s each and {left:.0f} s are left")
        if methods[:fitting]:
            measurement = Measurement(
                workload=workload_of(name), kinds=[ALL_METHODS[x] for x in methods[:fitting]],
                config=SplitKVConfig(), device=world.device, dtype=dtype, rounds=job.rounds,
                is_bare=True,
            )  # fmt: skip
            lines += measure_real(measurement, world, transport, say, passed)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        if world.rank == 0:
            figures = [{**asdict(line), "step_ms": line.step_ms} for line in lines]
            write_whole(output, json.dumps({"lines": figures, "dropped": dropped}))


def main(argv: Sequence[str] | None = None) -> int:
    """Joins the ranks and runs; the arguments are a file with the job and one to write."""
    job_file, output = map(Path, sys.argv[1:] if argv is None else argv)
    job = job_from_json(job_file.read_text())
    with join_world(device=job.device, backend="auto", timeout_s=TIMEOUT_S) as world:
        run(job, output, world, cp_transport(world, world.size, job.transport))
    return 0


if __name__ == "__main__":
    sys.exit(main())
