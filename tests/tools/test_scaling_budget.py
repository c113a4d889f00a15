"""`tools/bench_scaling.py`: what runs when, on ranks and a clock that are made up."""

import argparse
import pickle
from pathlib import Path
from types import SimpleNamespace

import bench_scaling
import pytest
import scaling_worker
import torch
from cp_report import Line
from cp_workloads import workload_of
from scaling_cases import LEAST, Case, Pace, all_cases, left_out

from megatron_splitkv.checks.processes import World

K = 1024
METHODS = ["split-kv", "te-p2p", "te-a2a", "ulysses", "ring", "all-gather"]


class FakeRanks:
    """Groups that run on a clock of their own, at what two H200 took in the last run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow_s: float = 5.0) -> None:
        self.now, self.slow_s = 0.0, slow_s
        self.ran: list[tuple[int, str, tuple[str, ...]]] = []
        self.starts: list[int] = []
        self.fails: set[int] = set()
        clock = SimpleNamespace(time=lambda: self.now)
        for module in (bench_scaling, scaling_worker):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(bench_scaling, "START", 0.0)
        monkeypatch.setattr(bench_scaling, "start_ranks", self.start)
        monkeypatch.setattr(scaling_worker, "measure_real", self.measure)
        monkeypatch.setattr(scaling_worker, "gather_from_all", lambda value, world: [value])

    def start(self, module, arguments, size, timeout_s, watch) -> int:
        job = pickle.loads(Path(arguments[0]).read_bytes())
        world = World(rank=0, size=size, device=torch.device("cpu"), backend="gloo")
        self.now += 6.5
        self.up: set[str] = set()
        self.starts.append(size)
        if size not in self.fails:
            scaling_worker.run(job, Path(arguments[1]), world, None)
        self.now += 3.5
        watch()
        return int(size in self.fails)

    def measure(self, m, world, transport, say, passed) -> list[Line]:
        names = [kind.name for kind in m.kinds]
        self.ran.append((world.size, m.workload.name, tuple(names)))
        self.now += self.slow_s
        self.slow_s = 0.4
        step_s = sum(m.workload.flop()) / world.size / 560e12
        for name in names:
            is_new = name.startswith("te-") and name not in self.up
            self.now += 0.3 + 5 * step_s + is_new * (4.0 if len(self.up) else 11.0)
            self.up |= {name} if is_new else set()
        figures = {"forward_ms": 250 * step_s, "backward_ms": 750 * step_s, "tflops": 560.0}
        return [Line(workload=m.workload.name, method=x, cp_size=world.size, mode="real", **figures)
                for x in names]  # fmt: skip


def run_on(ranks: FakeRanks, sizes: list[int], cases: list[Case], budget_s: float) -> list[Line]:
    """Runs, and checks that it kept to its time and brought the least in time."""
    args = argparse.Namespace(device="cpu", transport="auto", rounds=2, budget_s=budget_s)
    lines = bench_scaling.measure(args, cases, Pace(rounds=2, tflops=480.0), lambda found: None)
    assert ranks.now <= budget_s - bench_scaling.REPORT_S
    least = [(size, case.workload.name) for size in sizes for case in cases
             if (case.cp_size, case.level) == (size, LEAST)]  # fmt: skip
    ran = [(size, name) for size, name, _ in ranks.ran if size > 1 or (size, name) in least]
    assert ran[: len(least)] == least  # before anything else but what one rank has left
    return lines


@pytest.mark.parametrize("slow_s", [0.4, 5.0, 12.0])
def test_two_gpus_and_80_seconds_have_a_fit_and_peers(monkeypatch, slow_s):
    """A run stopped at cp 1 after one slow workload, and left 13 of its 80 seconds."""
    ranks = FakeRanks(monkeypatch, slow_s)
    strong = [workload_of("128k-gqa"), workload_of("8k-512k")]
    cases = all_cases([1, 2], [16 * K, 64 * K], strong, 8 * K, METHODS)
    lines = run_on(ranks, [1, 2], cases, 80.0)
    assert not [name for name in left_out(cases, lines) if name.endswith("cp 1")]
    with_te = {one.workload for one in lines if one.method == "te-p2p"}
    assert with_te >= {"8k-32k", "32k-gqa", "pile-32k"}
    assert len(lines) == len({(one.workload, one.cp_size, one.method) for one in lines})


def test_groups_go_again_and_one_that_fails_does_not(monkeypatch):
    ranks = FakeRanks(monkeypatch)
    ranks.fails = {4}
    cases = all_cases([1, 2, 4], [16 * K], [], 8 * K, METHODS)
    lines = run_on(ranks, [1, 2], cases, 520.0)
    assert ranks.starts == [1, 2, 4, 2]
    assert left_out(cases, lines) == [f"{x} at cp 4" for x in ("8k-64k", "64k-gqa", "pile-64k")]
    assert ranks.ran[-1][2][:2] == ("split-kv", "te-p2p")  # ours again, beside the others
