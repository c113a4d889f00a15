"""`tools/bench_ops.py` as a user runs it, on tiny problems. No figure is judged here."""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ops_contestants import FlashAttention3, Problem, TorchVarlen, contestants
from ops_gate import Sample
from ops_report import beside_aims, markdown
from ops_shapes import AIMS, CPU_SHAPES, CUDA_SHAPES, SHAPES, Shape, parse_shape
from ops_timing import believable_tflops, lines_of, time_in_turns
from torch.nn.functional import scaled_dot_product_attention

from tests.oracle import attend, mask_from_intervals

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_ops.py"
CPU = torch.device("cpu")


def test_every_contestant_comes_first_once_and_behind_every_other() -> None:
    """A kernel that draws much power slows the next one."""
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in "abcdef"}
    time_in_turns(calls, 4, CPU)  # and two to warm up
    rounds = [called[begin : begin + 6] for begin in range(0, len(called), 6)]
    assert sorted(order[0] for order in rounds) == sorted(calls)
    assert len({pair for order in rounds for pair in pairwise(order)}) == 6 * 5


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_reports(tmp_path):
    shapes = ("32x32,2/1,causal,hd16,fp32", "8x40,4/2,hd16/32,bf16", "cpu-merge-bf16")
    files = ("--json", str(tmp_path / "ops.json"), "--markdown", str(tmp_path / "ops.md"))
    run = _run("--shapes", *shapes, "--rounds", "2", *files)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "ops.json").read_text())
    forward = ("ours", "torch")
    backward = ("ours", "ours fp32", "ours accumulating", "torch")
    assert [(x["shape"], x["op"], x["contestant"]) for x in report["lines"]] == [
        *((shape, "forward", name) for shape in shapes[:1] for name in forward),
        *((shape, "backward", name) for shape in shapes[:1] for name in backward),
        *((shape, "forward", name) for shape in shapes[1:2] for name in forward),
        *((shape, "backward", name) for shape in shapes[1:2] for name in backward),
        *((shapes[2], "merge", name) for name in ("ours", "copy")),
    ]
    assert all(x["rate"] > 0 and x["min_ms"] <= x["median_ms"] for x in report["lines"])
    assert 0 < report["errors"][f"{shapes[0]} backward ours"] < 1e-5
    assert run.stdout == (tmp_path / "ops.md").read_text()
    assert "| torch / ours |" in run.stdout


def test_bad_arguments_are_named():
    for arguments, message in (
        (("--shapes", "8x8,3/2"), "'8x8,3/2': kv heads must divide query heads"),
        (("--shapes", "8x8,2/1,fp64"), "'fp64' is no part of a shape"),
        (("--shapes", "8x9,2/1,causal"), "causal needs as many rows as keys"),
        (("--shapes", "c17"), "'c17' must be one of c16, f16"),
        (("--rounds", "0"), "0 must be a whole number, 1 or more"),
    ):
        run = _run(*arguments)
        assert run.returncode == 2
        assert message in run.stderr
    with pytest.raises(argparse.ArgumentTypeError, match="sizes must be at least 1"):
        parse_shape("0x8,2/1")


def test_flop_and_intervals_count_visible_pairs():
    shape = parse_shape("32x32,2/1,causal,hd16/8")
    assert isinstance(shape, Shape)
    problem = Problem(replace(shape, dtype="fp32"), CPU)
    assert problem.num_pairs == 2 * 32 * 33 // 2
    assert shape.flop("forward", 10) == 10 * 2 * (16 + 8)
    assert shape.flop("backward", 10) == 10 * 2 * (3 * 16 + 2 * 8)


@pytest.mark.parametrize("name", ["pile", "scattered"])
def test_named_packs_have_the_sizes_they_say(name):
    begin, end = SHAPES[name].intervals()
    assert len(begin) == SHAPES[name].rows
    assert int(end.max()) <= SHAPES[name].keys
    assert ((begin >= 0) & (begin <= end)).all()


@pytest.mark.parametrize("spec", ["70x70,4/2,causal,hd32/16,fp32", "9x50,2/2,hd16,fp32"])
def test_the_gate_expects_what_dense_attention_gives_and_sees_a_wrong_row(spec):
    problem = Problem(parse_shape(spec), CPU)
    sample = Sample(problem)
    mask = mask_from_intervals(problem.begin, problem.end, len(problem.k))
    oracle = attend(
        problem.q, problem.k, problem.v, mask, softmax_scale=problem.softmax_scale,
        dout=problem.dout,
    )  # fmt: skip
    gradients = (oracle.dq, oracle.dk, oracle.dv)
    assert sample.forward_error(oracle.out, oracle.lse.float()) < 1e-6
    assert sample.backward_error(gradients) < 1e-6
    row, head = sample.rows[-1], sample.row_heads[-1]
    oracle.out[row, head, 0] += 0.1
    assert sample.forward_error(oracle.out) > sample.limit
    key, head = sample.keys[0], sample.key_heads[0]
    oracle.dv[key, head] = torch.nan
    assert sample.backward_error(gradients) == torch.inf


def test_a_wrong_kernel_of_ours_ends_the_run(monkeypatch):
    import bench_ops

    monkeypatch.setattr(bench_ops.Sample, "backward_error", lambda *_: 0.5)
    with pytest.raises(SystemExit, match=r"backward of ours differs from fp64 by 0\.5"):
        bench_ops.main(["--device", "cpu", "--shapes", "8x8,2/1,hd16,fp32", "--rounds", "1"])


def test_contestants_share_the_shapes():
    names = [c.name for c in contestants(torch.device("cuda"))]
    assert names[:3] == ["ours", "ours fp32", "ours accumulating"]
    assert names.count("fa2") == 2
    packed, full = SHAPES["pile"], SHAPES["f16"]
    for shape in (packed, full):
        fa2 = [c for c in contestants(torch.device("cuda")) if c.name == "fa2"]
        assert [c.refusal(shape) is None for c in fa2].count(True) == 1
    assert TorchVarlen().refusal(full) is not None
    fa3 = next(c for c in contestants(torch.device("cuda")) if c.name == "fa3")
    assert "No module named 'flash_attn_interface'" in (fa3.refusal(full) or "")


def test_flash_attention_3_is_called_in_its_layout(monkeypatch):
    fake = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, causal=False):
        bhsd = [x.transpose(1, 2) for x in (q, k, v)]
        out = scaled_dot_product_attention(*bhsd, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr(fake, "flash_attn_func", flash_attn_func, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake)
    shape = parse_shape("40x40,4/2,causal,hd64,fp32")
    problem, fa3 = Problem(shape, CPU), FlashAttention3()
    sample = Sample(problem)
    assert fa3.refusal(shape) is None
    assert sample.forward_error(fa3.forward(problem)()) < sample.limit
    assert sample.backward_error(fa3.backward(problem)()) < sample.limit
    assert "head dims 64, 128, 256" in (fa3.refusal(SHAPES["mla"]) or "")


def test_aims_take_the_fastest_library_and_name_it():
    def lines(shape, op, **ms):
        return lines_of(shape, op, {name: [x, x] for name, x in ms.items()}, 1e9)

    timed = [
        *lines("q512", "backward", ours=10.0, cudnn=15.0, fa3=13.0),
        *lines("q256", "forward", ours=1e9 / 701e9, cudnn=3.0),
        *lines("c16", "forward", ours=2.0, cudnn=2.1),
        *lines("scattered", "forward", ours=2.1),
    ]
    found = {(r.aim.shape, r.aim.of): (r.by, r.value, r.verdict) for r in beside_aims(timed)}
    assert found["q512", "library"] == ("fa3", pytest.approx(1.3), "missed")
    assert found["q256", "TFLOP/s"] == ("TFLOP/s", pytest.approx(701), "reached")
    assert found["c16", "cudnn"] == ("cudnn", pytest.approx(1.05), "missed")
    assert found["c16", "fa3"] == ("fa3", None, "not measured")
    assert found["scattered", "c16"] == ("c16", pytest.approx(2.0 / 2.1), "reached")
    assert "| q512" in markdown(timed, ["a note"], "cuda")


def test_aims_name_shapes_that_are_timed_by_default():
    assert {aim.shape for aim in AIMS} <= {shape.name for shape in CUDA_SHAPES}
    assert {shape.name for shape in CPU_SHAPES}.isdisjoint({shape.name for shape in CUDA_SHAPES})


def test_a_round_faster_than_the_gpu_can_be_is_left_out():
    (line,) = lines_of("c16", "forward", {"ours": [1.0, 1.25, 2.0]}, 1e12, highest_rate=880.0)
    assert (line.num_discarded, line.min_ms, line.rate) == (1, 1.25, pytest.approx(615.4, abs=0.1))
    assert lines_of("c16", "forward", {"ours": [1.0]}, 1e12, highest_rate=880.0) == []


def test_only_hopper_has_a_rate_that_no_round_can_exceed(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert believable_tflops(CPU) == math.inf
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    for capability, limit in (((9, 0), 881.0), ((10, 0), math.inf), ((8, 0), math.inf)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert believable_tflops(cuda) == pytest.approx(limit, abs=1.0)


def test_a_contestant_without_a_believable_round_is_named(monkeypatch):
    import bench_ops

    monkeypatch.setattr(bench_ops, "believable_tflops", lambda _: 880.0)
    args = bench_ops.build_parser().parse_args(["--device", "cpu"])
    bench, shape = bench_ops.Bench(args, CPU), SHAPES["c16"]
    bench._keep(shape, "forward", {"ours": [2.0], "cudnn": [1.0]}, 1e12)
    assert [line.contestant for line in bench.lines] == ["ours"]
    assert bench.notes == [
        "c16: every round of cudnn forward is beyond 880 TFLOP/s, which this GPU cannot reach; "
        "none is believed"
    ]
