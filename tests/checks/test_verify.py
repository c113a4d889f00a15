"""`verify` passes on this machine, and fails by name for each fault that it is there to find.

Faults are put into the product on every rank of a real gloo group, then the command runs on them.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gloo import run_gloo

SKIP = {"ops": ["attention", "model"], "attention": ["ops", "model"], "model": ["ops", "attention"]}


def with_scale(factor: float) -> Callable:
    """`splitkv_attention` whose logits are off by a factor."""
    from megatron_splitkv.attention import splitkv_attention

    def attention(q, k, v, context, *, softmax_scale=None, **options):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return splitkv_attention(q, k, v, context, softmax_scale=factor * scale, **options)

    return attention


def with_stages(taken: slice) -> Callable:
    """`splitkv_attention` that leaves stages of the exchange out."""
    from megatron_splitkv.attention import SplitKVContext, splitkv_attention

    def attention(q, k, v, context, **options):
        layout = dataclasses.replace(context.layout, stages=context.layout.stages[taken])
        fewer = SplitKVContext(layout=layout, transport=context.transport, config=context.config)
        return splitkv_attention(q, k, v, fewer, **options)

    return attention


def with_scale_of_a_route(route: str) -> Callable:
    """`splitkv_attention` whose logits are off where that travels."""
    from megatron_splitkv.attention import splitkv_attention

    def attention(q, k, v, context, **options):
        found = "queries" if context.layout.keys is None else "keys"
        right = splitkv_attention if found != route else with_scale(1.01)
        return right(q, k, v, context, **options)

    return attention


def with_more_traffic(q, k, v, context, **options):
    """The right result, and a row that nobody asked for."""
    from megatron_splitkv.attention import splitkv_attention

    if context.transport is not None:
        context.transport.all_gather(torch.zeros(200, 1000, dtype=torch.uint8)).wait()
    return splitkv_attention(q, k, v, context, **options)


def with_noise(q, k, v, context, **options):
    """Other bits in each run, within every limit."""
    from megatron_splitkv.attention import splitkv_attention

    out, lse = splitkv_attention(q, k, v, context, **options)
    return out, lse + 1e-7 * torch.rand_like(lse)


def with_coarse_partials(q, k, v, context, **options):
    """In a group, results as coarse as if partials had been rounded to bf16 more than once."""
    from megatron_splitkv.attention import splitkv_attention

    out, lse = splitkv_attention(q, k, v, context, **options)
    if context.transport is not None and q.dtype == torch.bfloat16:
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        out = out * (1 + 1.5e-3 * noise).to(out.dtype)
    return out, lse


def with_scaled_op(*args, softmax_scale, **options):
    from megatron_splitkv.ops import partial_attention

    return partial_attention(*args, softmax_scale=1.01 * softmax_scale, **options)


def with_scaled_gradient(*args, softmax_scale, **options):
    from megatron_splitkv.ops import partial_attention_backward

    return partial_attention_backward(*args, softmax_scale=1.01 * softmax_scale, **options)


def without_last_key(q, k, v, begin, end, **options):
    from megatron_splitkv.ops import partial_attention

    return partial_attention(q, k, v, begin, torch.maximum(begin, end - 1), **options)


def nothing(*args, **options):
    return None


ATTENTION = "megatron_splitkv.checks.attention_checks:splitkv_attention"
MODEL = "megatron_splitkv.mcore.module:splitkv_attention"
OPS = "megatron_splitkv.checks.op_checks"
# What is broken, on how many ranks, how, and what verify must name.
FAULTS = {
    "scale": (2, ATTENTION, (with_scale, 1.01), {"out", "lse", "dq", "dk"}),
    "dropped-stage": (3, ATTENTION, (with_stages, slice(0, 1)),
                      {"out", "sent / predicted", "weight"}),
    "alone": (2, "megatron_splitkv.verify:cp_transport", nothing, {"ranks that compute together"}),
    "silent-cp1": (2, ATTENTION, (with_stages, slice(0, 0)), {"out", "bytes sent", "weight"}),
    "traffic": (2, ATTENTION, with_more_traffic, {"sent / predicted"}),
    "plans": (2, "megatron_splitkv.checks.attention_checks:check_same_plan", nothing,
              {"refused where one"}),
    "noise": (2, ATTENTION, with_noise, {"numbers that differ between runs"}),
    "coarse": (2, ATTENTION, with_coarse_partials, {"error of out in bf16"}),
    "op-scale": (1, f"{OPS}:partial_attention", with_scaled_op, {"out", "lse", "merge"}),
    "op-gradient": (1, f"{OPS}:partial_attention_backward", with_scaled_gradient, {"dq", "dk"}),
    "op-mask": (1, f"{OPS}:partial_attention", without_last_key, {"out", "worst row"}),
    "op-merge": (1, f"{OPS}:merge_partials_", nothing, {"merge"}),
    "model-scale": (2, MODEL, (with_scale, 1.01), {"worst gradient"}),
    "model-silent-cp1": (2, MODEL, (with_stages, slice(0, 0)),
                         {"worst gradient", "loss", "bytes of all layers"}),
}  # fmt: skip


def verify_broken(target: str, fault: object, section: str, report: str, options: list[str]) -> int:
    """Body of a rank: breaks the product, runs the command, puts the product back."""
    from importlib import import_module
    from unittest import mock

    from megatron_splitkv import verify

    module, _, name = target.partition(":")
    broken = fault[0](fault[1]) if isinstance(fault, tuple) else fault
    argv = ["--skip", *SKIP[section], "--json", report, *options]
    with mock.patch.object(import_module(module), name, broken):
        return verify.main(argv)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, tmp_path: Path) -> None:
    size, target, fault, named = FAULTS[name]
    section = "model" if target == MODEL else ("ops" if target.startswith(OPS) else "attention")
    report = tmp_path / "verify.json"
    options = ["--device", "cpu", "--stages", "2"]
    codes = run_gloo(size, verify_broken, target, fault, section, str(report), options)
    assert codes == [1] * size
    checks = json.loads(report.read_text())["checks"]
    failures = [check["name"] for check in checks if not check["is_ok"]]
    for part in named:
        assert any(part in failure for failure in failures), (part, failures)
    if name in ("traffic", "plans", "noise", "coarse", "op-merge"):  # these leave all results right
        assert not any(failure.startswith(("out", "lse", "dq")) for failure in failures)


@pytest.mark.parametrize(
    ("target", "route"), [(ATTENTION, "queries"), (MODEL, "keys")], ids=["attention", "model"]
)
def test_a_fault_of_one_route_is_found_there_alone(route: str, target: str, tmp_path: Path) -> None:
    section = "model" if target == MODEL else "attention"
    report, fault = tmp_path / "verify.json", (with_scale_of_a_route, route)
    options = ["--device", "cpu"]
    codes = run_gloo(2, verify_broken, target, fault, section, str(report), options)
    assert codes == [1, 1]
    checks = json.loads(report.read_text())["checks"]
    failed = {check["section"] for check in checks if not check["is_ok"]}
    results = {name for name in failed if name.startswith(("attention", "GPT"))}
    assert results
    assert all(name.endswith("keys travel") == (route == "keys") for name in results)


def verify_alone(report: str, options: list[str]) -> int:
    from megatron_splitkv import verify

    return verify.main([*options, "--json", report])


@pytest.mark.parametrize(
    "options",
    [
        ["--partial-dtype", "bf16", "--stages", "1"],
        ["--keep-queries", "--stages", "8"],
        ["--cp", "1"],  # three groups of one
    ],
    ids=" ".join,
)
def test_other_settings_pass(options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "verify.json"
    options = ["--skip", "ops", "--device", "cpu", *options]
    codes = run_gloo(3, verify_alone, str(report), options)
    failures = [c for c in json.loads(report.read_text())["checks"] if not c["is_ok"]]
    assert (codes, failures) == ([0, 0, 0], [])


def run_command(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_splitkv.verify", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_the_command_starts_its_ranks_and_passes(tmp_path: Path) -> None:
    report = tmp_path / "verify.json"
    run = run_command("--cp", "2", "--device", "cpu", "--json", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "checks passed" in run.stdout
    assert "cp 2, 2 processes over gloo" in run.stdout
    sections = {check["section"] for check in json.loads(report.read_text())["checks"]}
    assert {"group", "communication", "ops on cpu, bfloat16"} <= sections
    for route in ("queries", "keys"):
        assert f"attention over the group, bfloat16, {route} travel" in sections
    assert any(section.startswith("GPT in float32, cp 2") for section in sections)


def test_a_rank_that_dies_ends_the_command(tmp_path: Path) -> None:
    """A report that cannot be written: the first rank fails, the command says so and ends."""
    run = run_command("--cp", "2", "--skip", "ops", "model", "--json", str(tmp_path / ("x" * 999)))
    assert run.returncode == 1
    assert "File name too long" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cp", "0"), "0 must be a whole number, 1 or more"),
        (("--stages", "0"), "0 must be a whole number, 1 or more"),
        (("--timeout", "-1"), "-1 must be a number above 0"),
        (("--json", "/no/such/folder/x"), "must be a file in a folder that exists"),
        (("--cp", "2", "--device", "cuda"), "--device cuda, but torch finds no GPU"),
        (("--device", "cpu", "--backend", "nccl"), "needs a GPU for each local rank, got 0 GPUs"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], message: str) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    run = run_command(*options)
    assert run.returncode == 2
    assert run.stderr.count(message) == 1  # not once by each rank


def verify_with(options: list[str]) -> int:
    from megatron_splitkv import verify

    return verify.main(options)


def test_a_group_that_does_not_fit_the_world_is_refused() -> None:
    assert run_gloo(3, verify_with, ["--cp", "2", "--device", "cpu"]) == [2, 2, 2]
