"""`bench_cp.py` on real ranks: what becomes of methods that fail, and the clock."""

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from cp_clock import StepClock
from cp_measure import Measurement, measure_real
from cp_methods import Method, RankPart, SplitKV
from cp_report import Line
from cp_workloads import Workload

from megatron_splitkv.checks.processes import World
from megatron_splitkv.comm import ProcessGroupTransport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal
from tests.gloo import run_gloo

CPU = torch.device("cpu")
WORKLOAD = Workload(name="test", doc_lens=(40, 24), queries=Causal(), heads=(4, 2), head_dim=16)


class Failing(SplitKV):
    name = "failing"

    def part(self, rank, transport, device) -> RankPart:
        raise RuntimeError("no such backend\nand more of it")


class Wrong(SplitKV):
    name = "wrong"

    def part(self, rank, transport, device) -> RankPart:
        part = super().part(rank, transport, device)
        forward = part.forward
        part.forward = lambda inputs: forward(inputs) * 1.1
        return part


class Refusing(SplitKV):
    name = "refusing"

    @staticmethod
    def refusal(workload, cp_size) -> str | None:
        return "not today"


def lines_of(kinds: list[type[Method]]) -> list[Line]:
    """Lines of this rank."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=CPU, backend="gloo")
    measurement = Measurement(
        workload=WORKLOAD, kinds=kinds, config=SplitKVConfig(), device=CPU, dtype=torch.float32,
        rounds=3,
    )  # fmt: skip
    transport = ProcessGroupTransport(group=dist.group.WORLD)
    return list(measure_real(measurement, world, transport, lambda text: None))


def test_a_method_that_fails_is_a_line_and_the_others_go_on():
    for lines in run_gloo(2, lines_of, [Failing, Wrong, Refusing, SplitKV]):
        assert [line.method for line in lines] == ["failing", "wrong", "refusing", "split-kv"]
        assert lines[0].note == "RuntimeError: no such backend"
        assert "wrong differs from dense fp64 attention by" in lines[1].note
        assert lines[2].note == "not today"
        assert all(line.step_ms is None for line in lines[:3])
        timed = lines[3]
        assert timed.note == ""
        assert min(timed.step_ms, timed.host_ms, timed.ideal_share, timed.sent_mb) > 0
        assert timed.exposed_ms is not None
        assert timed.spread >= 0


def test_the_clock_tells_bodies_apart():
    clock = StepClock(CPU)
    short, long = clock.times_ms([lambda: None, lambda: time.sleep(0.05)])
    assert short < 50 <= long
    assert clock.host_ms >= long


def test_workloads_of_a_kind_share_their_small_problem():
    assert run_gloo(2, times_checked) == [1, 1]


def times_checked() -> int:
    said: list[str] = []
    passed: set[object] = set()
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=CPU, backend="gloo")
    for name, lens in (("first", (40, 24)), ("second", (64, 8))):
        workload = replace(WORKLOAD, name=name, doc_lens=lens)
        measurement = Measurement(
            workload=workload, kinds=[SplitKV], config=SplitKVConfig(), device=CPU,
            dtype=torch.float32, rounds=1,
        )  # fmt: skip
        transport = ProcessGroupTransport(group=dist.group.WORLD)
        list(measure_real(measurement, world, transport, said.append, passed))
    return sum("is right" in text for text in said)
