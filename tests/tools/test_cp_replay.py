"""Replay: what is written down of a rank, the model of the wire, and the command."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from cp_baselines import METHODS
from cp_measure_replay import _Replayed
from cp_methods import RankInputs
from cp_replay import (
    Link,
    Recorder,
    ReplayTransport,
    Start,
    Wait,
    Work,
    bytes_sent,
    compute_ms,
    median_trace,
    simulate,
)
from cp_transports import WaitingTransport
from cp_workloads import Workload

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.checks.processes import free_port
from megatron_splitkv.comm import Pending
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.layout import build_layout
from megatron_splitkv.ops import partial_attention
from megatron_splitkv.plan import Causal, make_plan
from megatron_splitkv.plan.report import AttentionShape, report_plan

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_cp.py"
CPU = torch.device("cpu")
# 1 MB takes 1 ms inside a host and 10 ms outside.
LINK = Link(alpha_us=500.0, host_gbs=1.0, network_gbs=0.1, host_size=2)
MB = 10**6


def work(kernel_ms: float, other_ms: float = 0.0) -> Work:
    return Work(kernel_ms=kernel_ms, other_ms=other_ms)


def test_a_collective_takes_as_long_as_its_busiest_link():
    nothing = [[0] * 4 for _ in range(4)]
    assert LINK.collective_ms(nothing) == 0.5
    inside = [[0, MB, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert LINK.collective_ms(inside) == pytest.approx(1.5)
    outside = [[0, MB, MB, 0], [0] * 4, [0] * 4, [0] * 4]
    assert LINK.collective_ms(outside) == pytest.approx(10.5)
    into_one = [[0] * 4, [MB, 0, 0, 0], [MB, 0, 0, 0], [MB, 0, 0, 0]]
    assert LINK.collective_ms(into_one) == pytest.approx(20.5)  # two of them over the network


def test_what_all_get_alike_crosses_to_each_other_host_once():
    """Each of 4 ranks gives 1 MB: a host of 2 needs 2 MB of the other, 1 MB by each adapter."""
    alike = [[0 if rank == peer else MB for peer in range(4)] for rank in range(4)]
    assert LINK.collective_ms(alike) == pytest.approx(20.5)
    assert LINK.collective_ms(alike, is_all_gather=True) == pytest.approx(10.5)
    # The last host is one rank, which must fetch all for itself.
    odd = [row[:3] for row in alike[:3]]
    assert LINK.collective_ms(odd, is_all_gather=True) == pytest.approx(20.5)
    traces = [[Start(bytes_to=tuple(row), is_all_gather=True), Wait(index=0)] for row in alike]
    assert simulate(traces, LINK)[0] == pytest.approx(10.5)


def test_compute_hides_the_wire_and_the_rest_is_waited_for():
    start = Start(bytes_to=(0, MB))
    back = Start(bytes_to=(MB, 0))
    hidden = [[start, work(5), Wait(index=0), work(1)], [back, work(5), Wait(index=0), work(1)]]
    assert simulate(hidden, LINK) == (pytest.approx(6.0), pytest.approx(1.5))
    exposed = [[start, work(1), Wait(index=0), work(1)], [back, work(1), Wait(index=0), work(1)]]
    assert simulate(exposed, LINK) == (pytest.approx(2.5), pytest.approx(1.5))


def test_a_collective_waits_for_the_slowest_rank_and_for_the_one_before():
    start, back = Start(bytes_to=(0, MB)), Start(bytes_to=(MB, 0))
    late = [[start, Wait(index=0)], [work(4, 1), back, Wait(index=0)]]
    assert simulate(late, LINK)[0] == pytest.approx(6.5)
    two = [[one, one, Wait(index=0), Wait(index=1)] for one in (start, back)]
    assert simulate(two, LINK)[0] == pytest.approx(3.0)


def test_ranks_that_start_other_collectives_are_refused():
    with pytest.raises(ValueError, match=r"ranks started \[0, 1\] collectives"):
        simulate([[work(1)], [Start(bytes_to=(0, 0))]], LINK)


def test_the_recorder_tells_kernels_from_the_rest_and_counts_calls():
    recorder = Recorder(CPU)
    with recorder:
        torch.zeros(3).add_(1).mul_(2)
    assert recorder.num_calls == 3
    (only,) = recorder.trace()
    assert only.kernel_ms == 0 and only.other_ms > 0
    with recorder:
        torch.zeros(3)
    assert recorder.num_calls == 1


def test_the_recorder_counts_rows_of_kernels():
    recorder = Recorder(CPU)
    q, keys = torch.ones(3, 1, 16), torch.ones(5, 1, 16)
    begin, end = torch.zeros(3, dtype=torch.int32), torch.full((3,), 5, dtype=torch.int32)
    with recorder:
        for _ in range(2):
            partial_attention(q, keys, keys, begin, end, softmax_scale=1.0)
        recorder.note(Wait(index=0))
        partial_attention(q, keys, keys, begin, end, softmax_scale=1.0)
    works = [item for item in recorder.trace() if isinstance(item, Work)]
    assert [work.rows for work in works] == [6, 3]
    assert all(work.kernel_ms > 0 for work in works)


def test_rows_that_are_made_up_take_no_time_of_the_rank(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("cp_replay.time.perf_counter", lambda: float(next(clock)))
    recorder = Recorder(CPU)
    transport = ReplayTransport(rank=0, size=2, recorder=recorder)
    counts = np.array([[0, 4], [5, 0]])
    with recorder:  # marks: in, start, made up, other, wait, out
        received = transport.exchange(torch.ones(4, 8, dtype=torch.uint8), counts).wait()
    assert received.shape == (5, 8)
    assert recorder.trace() == [
        work(0, 1000.0), Start(bytes_to=(0, 32)), work(0, 2000.0), Wait(index=0), work(0, 1000.0),
    ]  # fmt: skip


class SlowTransport:
    """A group of one rank whose collectives take a while."""

    rank, size = 0, 1

    def exchange(self, rows, counts):
        def wait():
            time.sleep(0.2)
            return rows

        return Pending(wait)


def test_waiting_is_no_kernel_time():
    recorder = Recorder(CPU)
    transport = WaitingTransport(SlowTransport(), recorder)
    rows = torch.ones(4, 16, dtype=torch.uint8)
    q = torch.ones(1, 1, 16)
    begin, end = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with recorder:
        pending = transport.exchange(rows, np.array([[4]]))
        partial_attention(q, q, q, begin, end, softmax_scale=1.0)
        pending.wait()
        torch.zeros(1)
    kernel_ms, other_ms = compute_ms(recorder.trace())
    assert kernel_ms < 100 and other_ms >= 200


def test_a_run_with_launch_gaps_is_made_again():
    runs = iter([False, True, True, True])  # which pauses are long enough: first forward is not

    class Pauses:
        def run(self, name, body, *, is_timed):
            body()
            return next(runs)

    method = METHODS["split-kv"](small_workload(), 1, SplitKVConfig())
    x = torch.ones(8, 1, 16)
    replayed = _Replayed(
        part=method.part(0, None, CPU), inputs=RankInputs(q=x, k=x, v=x, dout=x),
        recorder=Recorder(CPU), transport=None,
    )  # fmt: skip
    assert replayed.run("test", Pauses(), is_timed=True)
    assert len(replayed.forward) == len(replayed.backward) == 1
    assert next(runs, None) is None
    runs = iter([False] * 100)
    assert not replayed.run("test", Pauses(), is_timed=True)


def small_workload() -> Workload:
    return Workload(name="test", doc_lens=(8,), queries=Causal(), heads=(1, 1), head_dim=16)


def test_median_of_runs():
    traces = [[work(ms, 2 * ms), Wait(index=0)] for ms in (1.0, 9.0, 2.0)]
    assert median_trace(traces) == [work(2.0, 4.0), Wait(index=0)]
    assert compute_ms(median_trace(traces)) == (2.0, 4.0)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_replayed_rank_sends_what_its_plan_predicts(num_stages):
    """Every rank in turn, alone: the bytes are those of the group, and the traces fit together."""
    plan = make_plan([300, 41], 4, block_size=16)
    config = SplitKVConfig(num_stages=num_stages)
    shape = AttentionShape(num_heads_q=2, num_heads_kv=1, head_dim_qk=8, head_dim_v=8, dtype="fp32")
    report = report_plan(plan, shape, config)
    forward, backward = [], []
    for rank in range(4):
        layout = build_layout(plan, rank, num_stages=num_stages)
        recorder = Recorder(CPU)
        transport = ReplayTransport(rank=rank, size=4, recorder=recorder)
        context = SplitKVContext(layout=layout, transport=transport, config=config)
        q = torch.randn(layout.num_query_rows, 2, 8, requires_grad=True)
        k, v = (torch.randn(layout.num_kv_rows, 1, 8, requires_grad=True) for _ in range(2))
        with recorder:
            out, _ = splitkv_attention(q, k, v, context)
        forward.append(recorder.trace())
        transport.restart()
        with recorder:
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        backward.append(recorder.trace())
        assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert tuple(map(bytes_sent, forward)) == report.bytes_forward
    assert tuple(map(bytes_sent, backward)) == report.bytes_backward
    for traces in (forward, backward):
        for kernel_ms, other_ms in map(compute_ms, traces):
            assert kernel_ms > 0 and other_ms > 0
        assert simulate(traces, LINK)[0] > max(sum(compute_ms(trace)) for trace in traces)


def run(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip


SMALL = ("--lengths", "200,50", "--heads", "6/2", "--head-dim", "16", "--rounds", "1",
         "--device", "cpu")  # fmt: skip


def test_replay_command(tmp_path):
    report, table = tmp_path / "r.json", tmp_path / "r.md"
    files = ("--json", str(report), "--markdown", str(table))
    process = run("replay", "--cp", "2", "4", *SMALL, *files)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "Modelled: fwd ms" in out
    lines = json.loads(report.read_text())["lines"]
    assert [(line["cp_size"], line["method"]) for line in lines] == [
        (cp, name) for cp in (2, 4) for name in ("split-kv", "ring", "all-gather", "ulysses")
    ]
    refused = lines.pop()
    assert refused["note"] == "6 query heads do not divide over 4 ranks"
    for line in lines:
        assert line["step_ms"] > 0 and line["sent_mb"] > 0 and line["kernel_imbalance"] >= 1
        assert 0 < line["other_share"] < 1 and line["wire_ms"] > 0
        kernels = [sum(sum(way["kernel_ms"]) for way in rank) for rank in line["ranks"]]
        assert max(kernels) / mean(kernels) == pytest.approx(line["kernel_imbalance"])
    own_and_others = [way["rows"] for way in lines[0]["ranks"][0]]
    assert own_and_others[0] == own_and_others[1] and own_and_others[0][0] == 125
    written = table.read_text().splitlines()
    assert sum(line.startswith("|") for line in written) == 2 + 8
    assert len({line.count("|") for line in written[:10]}) == 1
    assert "ulysses at cp 4: 6 query heads do not divide over 4 ranks" in written[-1]
    assert "ulysses at cp 4: 6 query heads" in out


def test_real_command(tmp_path):
    report = tmp_path / "r.json"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [
        run("real", "--suffix", "20", *SMALL, "--json", str(report), RANK=str(rank),
            LOCAL_RANK=str(rank), **shared)
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "Everything measured" in outputs[0][0] and outputs[1][0] == ""
    lines = json.loads(report.read_text())["lines"]
    assert [line["method"] for line in lines] == ["split-kv", "ring", "all-gather", "ulysses"]
    for line in lines:
        assert line["mode"] == "real" and line["step_ms"] > 0 and line["sent_mb"] > 0


def test_replay_is_not_run_by_every_process():
    shared = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    process = run("replay", *SMALL, **shared)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "replay is one process" in err


def test_wrong_options_are_named():
    for arguments, message in (
        (("replay", "--lengths", "64", "--heads", "3/2"), "kv heads must divide query heads"),
        (("replay", "--stages", "0", "--lengths", "64"), "0 must be a whole number, 1 or more"),
        (("replay", "--rounds", "0", "--lengths", "64"), "0 must be a whole number, 1 or more"),
        (("replay", "--host-gbs", "0", "--lengths", "64"), "0 must be a number above 0"),
        (("replay", "--lengths", "64", "--workloads", "32k"), "exclude each other"),
        (("replay", "--heads", "4/2"), "--heads describes a workload of its own"),
        (("replay", "--lengths", "64", "--json", "/no/such/x"), "in a folder that exists"),
        (("real", "--lengths", "64", "--cp", "2"), "--cp is for replay"),
        (("real", "--lengths", "64"), "real needs ranks"),
    ):
        process = run(*arguments, "--device", "cpu")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and message in err
