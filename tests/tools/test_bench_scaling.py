"""`tools/bench_scaling.py`: cases, the fit, the tables, and a small run on real ranks."""

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_scaling import read_done
from cp_methods import SplitKV
from cp_report import Line
from cp_workloads import NAMES, workload_of
from scaling_cases import (
    ALONE,
    KINDS,
    LEAST,
    OURS,
    Case,
    Pace,
    all_cases,
    choose,
    kind_of,
    left_out,
    once_seconds,
    size_name,
)
from scaling_fit import Projected, fit, measured_of, plan_of, project
from scaling_report import Report, markdown, plot, rows_of
from scaling_worker import Job
from scaling_worker import run as run_cases

from megatron_splitkv.checks.processes import World
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Suffix
from megatron_splitkv.plan.predict import Calibration, predict_load

TOOL = Path(__file__).resolve().parents[2] / "tools/bench_scaling.py"
K = 1024
TERMS = Calibration(
    device="made up", dtype="bf16", head_dim=128, num_heads_q=32, num_heads_kv=8, pair_ns=0.1,
    row_ns=40.0, run_ns=2e3, base_ns=2e5, worst_error=0.0, link_gb_per_s=180.0,
    link_latency_us=60.0, source="by hand",
)  # fmt: skip


def test_workload_names():
    rows, document, pile = (workload_of(name) for name in ("8k-1m", "64k-gqa", "pile-3k"))
    assert (rows.queries, rows.num_tokens, rows.heads) == (Suffix(8 * K), K * K, (32, 4))
    assert (document.doc_lens, document.heads) == ((64 * K,), (32, 8))
    assert pile.num_tokens == 3 * K
    assert workload_of("128").doc_lens == (128,)
    assert [workload_of(name).name for name in NAMES] == list(NAMES)
    for name in ("0k", "8k-", "pile-", "64g", "-gqa", "piles"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be one of"):
            workload_of(name)
    assert [size_name(x) for x in (100, 2 * K, 3 * K * K)] == ["100", "2k", "3m"]


def some_cases() -> list[Case]:
    strong = [workload_of("4k-gqa"), workload_of("64-4k")]
    return all_cases([1, 2], [K, 2 * K], strong, 64, ["split-kv", "ring", "te-p2p"])


def test_what_weak_and_strong_scaling_share_is_run_once():
    cases = some_cases()
    names = [(case.workload.name, case.cp_size) for case in cases]
    assert len(set(names)) == 3 * 2 * 2 + 2  # at cp 2 strong is 2K a rank
    once = [(*name, x) for name, case in zip(names, cases, strict=True) for x in case.methods]
    assert len(once) == len(set(once)) == (3 * 2 + 2) + 3 * 3 * 2
    assert {case.methods for case in cases if case.cp_size == 1} == {("split-kv",)}
    assert {kind_of(case.workload) for case in cases} == set(KINDS)
    assert all(case.kind == kind_of(case.workload) for case in cases)
    strong = {(case.workload.name, case.cp_size) for case in cases if not case.is_weak}
    assert strong == {("4k-gqa", 1), ("64-4k", 1)}


def names_of(chosen: tuple[list[Case], list[float]]) -> list[str]:
    return [f"{case.name}: {', '.join(case.methods)}" for case in chosen[0]]


def test_what_matters_most_comes_first_and_ours_before_others():
    """Ours in every group, all of one rank, peers, strong scaling, the second size."""
    pace, cases = Pace(rounds=1, tflops=0.05), some_cases()
    chosen, seconds = choose(cases, 1e4, pace)
    assert {case.name for case in chosen} == {case.name for case in cases}
    assert set(left_out(chosen, [])) == {case.name for case in chosen}
    weak = [f"{name} at cp 2" for name in ("64-2k", "2k-gqa", "pile-2k")]
    order = [case.name for case in chosen if case.cp_size == 2]
    assert order == [*weak, *weak, "4k-gqa at cp 2", "64-4k at cp 2", "pile-4k at cp 2"]
    levels = [case.level for case in chosen]
    assert levels == sorted(levels)
    assert {case.cp_size for case in chosen if case.level == LEAST} == {1, 2}
    assert {case.cp_size for case in chosen if case.level == ALONE} == {1}
    first_s = pace.seconds(cases[0]) + 0.1
    assert names_of(choose(cases, first_s, pace)) == ["64-1k at cp 1: split-kv"]
    first = [case for case in cases if case.level <= ALONE + 1]
    some = choose(cases, sum(choose(first, 1e4, pace)[1]) + 1e-6, pace)
    assert names_of(some) == names_of(choose(first, 1e4, pace))
    assert names_of(some)[-1] == "pile-2k at cp 2: split-kv, ring, te-p2p"
    assert sum(choose(cases, 80.0, pace)[1]) <= 80.0 < sum(seconds)
    assert choose(cases, -1.0, pace) == ([], [])


def test_a_group_pays_once_to_start_and_a_peer_once_for_its_plans():
    pace = Pace(rounds=1, tflops=480.0)
    case = next(case for case in some_cases() if case.level > ALONE)
    first = pace.seconds(case)
    again = pace.seconds(case, once_seconds(case).keys())
    assert first >= again + 6.0 + 7.0 + 4.5  # to start, to import, first plans
    other = replace(case, methods=("te-a2a",))
    plans = pace.seconds(other, once_seconds(case).keys())
    assert plans >= pace.seconds(other, once_seconds(other).keys()) + 4.5


def test_estimates_follow_what_the_cases_before_took():
    pace = Pace(rounds=1, tflops=480.0)
    done, *_, big = all_cases([1], [256 * K, 512 * K], [], 8 * K, ["split-kv"])[:5]
    assert big.name == "512k-gqa at cp 1"
    paid = once_seconds(done).keys()
    slower = pace.after(done, paid, took_s=40.0, step_s=6.0)
    faster = pace.after(done, paid, took_s=0.9, step_s=0.1)
    usual, more, less = (x.seconds(big, paid) for x in (pace, slower, faster))
    assert more > 4 * usual
    assert less < usual
    overhead = pace.after(done, paid, took_s=40.0, step_s=1e-3)  # says nothing of steps
    assert overhead.seconds(big, paid) < 1.5 * usual
    assert overhead.seconds(done, paid) > 2 * pace.seconds(done, paid)
    started = {(1, "start")}
    assert (
        pace.after(done, started, 40.0, step_s=1.0).fixed_s == pace.fixed_s
    )  # slow, as first ones


def test_the_methods_that_the_time_allows_are_run(tmp_path, monkeypatch):
    """Ours first; a case that not even it can end is left, one that is found to be fast is run."""
    cases = [
        Case(level=0, kind="causal", workload=workload_of(name), cp_size=1,
             methods=("split-kv", "ring"), is_weak=True)
        for name in ("64-gqa", "128-gqa", "192-gqa")
    ]  # fmt: skip
    costs = {"64-gqa": 1.0, "128-gqa": 4e3, "192-gqa": 2e4}
    monkeypatch.setattr(
        Pace, "seconds", lambda _, case, paid=(): costs[case.workload.name] * len(case.methods)
    )
    job = Job(
        device="cpu", transport="auto", rounds=1, start=time.time(), deadline=time.time() + 7e3,
        pace=Pace(rounds=1, tflops=0.05), cases=cases,
    )  # fmt: skip
    world = World(rank=0, size=1, device=torch.device("cpu"), backend="gloo")
    run_cases(job, tmp_path / "lines", world, None)
    lines, pace = read_done((tmp_path / "lines").read_text())
    assert left_out(cases, lines) == ["128-gqa at cp 1: ring", "192-gqa at cp 1"]
    assert [(one.workload, one.method) for one in lines] == [
        ("64-gqa", "split-kv"), ("64-gqa", "ring"), ("128-gqa", "split-kv")
    ]  # fmt: skip
    assert pace.expected_fixed_s > job.pace.expected_fixed_s


def made_up(terms: dict[str, Calibration], sizes: tuple[int, ...]) -> list:
    found = []
    for case in all_cases(sizes, [16 * K, 64 * K], [workload_of("256k-gqa")], 8 * K, ["split-kv"]):
        one = measured_of(case.kind, case.workload, case.cp_size, "bf16", 1.0)
        predicted = predict_load(one.load, terms[case.kind]).layer_us
        found.append(replace(one, step_us=predicted))
    return found


def test_the_fit_finds_terms_that_predict_the_group_that_was_left_out():
    pairs = zip(KINDS, (0.1, 0.11, 0.12), strict=True)
    terms = {kind: replace(TERMS, pair_ns=pair_ns) for kind, pair_ns in pairs}
    first = replace(TERMS, pair_ns=1.0, link_gb_per_s=300.0, link_latency_us=20.0)
    found = fit(made_up(terms, (1, 2, 4, 8)), first)
    calibrations, checked = found.calibrations, found.checked
    assert found.missing == ""
    assert {one.measured.cp_size for one in checked if not one.is_fitted} == {8}
    assert max(abs(one.error) for one in checked) < 0.02
    for kind, terms_found in calibrations.items():
        assert terms_found.pair_ns == pytest.approx(terms[kind].pair_ns, rel=0.05)
    assert calibrations["causal"].link_gb_per_s == pytest.approx(180.0, rel=0.1)
    assert "us; worst error" in markdown(Report(rows=[], dropped=[], fit=found), [])


def test_one_rank_says_nothing_about_the_link():
    found = fit(made_up(dict.fromkeys(KINDS, TERMS), (1, 2)), TERMS)
    assert found.calibrations["rows"].link_gb_per_s == TERMS.link_gb_per_s
    assert {one.measured.cp_size for one in found.checked if one.is_fitted} == {1}
    text = markdown(Report(rows=[], dropped=[], fit=found), [])
    assert "link 180 GB/s, 60 us, as given" in text
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([], TERMS)


def test_few_points_are_no_fit():
    """The last report had "87.9 % missed" from one point and four terms."""
    measured = made_up(dict.fromkeys(KINDS, TERMS), (1, 2))
    alone = [one for one in measured if one.cp_size == 1]
    for few in (alone[:1], alone[:6]):
        found = fit([*few, *measured[len(alone) :]], TERMS)
        assert (found.calibrations, found.checked) == ({}, ())
    assert "points to fit: rows 2, causal 3, pile 1; 2 of a kind" in found.missing
    assert "more than the 6 terms" in found.missing
    one_pile = [one for one in measured if one.name != "pile-64k"]
    more = [replace(one, step_us=2 * one.step_us) for one in one_pile[:2]]
    found = fit([*one_pile, *more], TERMS)
    assert found.calibrations.keys() == {"rows", "causal"}
    assert "points to fit: pile 1;" in found.missing
    rows = rows_of([line("8k-128k", OURS, 2, 480.0)], {("8k-128k", 2)})
    text = markdown(Report(rows=rows, dropped=[], fit=found), [])
    assert "Not projected for want of points to fit: pile 1;" in text
    cells = [[cell.strip() for cell in x.split("|")[1:-1]] for x in text.splitlines()]
    for kind in KINDS:
        assert [f"{kind}, 64k tokens a rank, cp 64", "91%", "-", "not established"] in cells


def test_the_projection_goes_from_one_node_over_a_slower_network():
    workload = workload_of("512k-gqa")
    slow, fast = (
        project("causal", workload, TERMS, rate, 1e3 / TERMS.pair_ns) for rate in (10.0, 1e6)
    )
    assert [one.cp_size for one in slow] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert slow[0] == fast[0]  # inside a node
    assert all(a.share < b.share for a, b in zip(slow[1:], fast[1:], strict=True))
    assert all(0 < one.share <= 1 for one in slow)
    assert {one.tokens_per_rank for one in slow} == {64 * K}


def line(workload: str, method: str, cp_size: int, tflops: float | None, note: str = "") -> Line:
    step_ms = None if tflops is None else 1e3 / tflops
    return Line(
        workload=workload, method=method, cp_size=cp_size, mode="real", forward_ms=step_ms,
        backward_ms=step_ms, tflops=tflops, kernel_imbalance=1.01, note=note,
    )  # fmt: skip


def test_shares_are_of_the_best_rate_of_one_rank(tmp_path):
    lines = [
        line("64k-gqa", "split-kv", 1, 500.0),
        line("16k-gqa", "split-kv", 1, 400.0),
        line("512k-gqa", "split-kv", 8, 480.0),
        line("512k-gqa", "ring", 8, 240.0),
        line("512k-gqa", "ulysses", 8, None, "4 kv heads do not divide"),
        line("8k-512k", "split-kv", 8, 480.0),  # no rate of one rank for this kind
    ]
    rows = rows_of(lines, {("64k-gqa", 1), ("512k-gqa", 8)})
    assert [row.share for row in rows] == [1.0, 0.8, 0.96, 0.48, None, None]
    assert rows[2].planned_imbalance == pytest.approx(1.0, abs=2e-3)
    assert rows[3].planned_imbalance is None
    ahead = [
        Projected(kind="causal", tokens_per_rank=64 * K, cp_size=n, layer_us=1.0, share=0.9)
        for n in (8, 64)
    ]
    report = Report(
        rows=rows, dropped=["1m-gqa at cp 8"], projected=ahead, network_gb_per_s=45.0
    )  # fmt: skip
    text = markdown(report, ["512k-gqa", "16k-gqa"])
    assert "## Strong scaling, 512k-gqa" in text
    weak, _, strong = text.partition("## Strong scaling")
    assert "| 64k " in weak and "| 16k " not in weak  # 16K is not one of its points
    assert "| 16k " in strong
    assert "nodes of 8 ranks with 45 GB/s of each rank between them, as given" in text
    assert "- not run: 1m-gqa at cp 8" in text
    assert "- 512k-gqa, ulysses at cp 8: 4 kv heads do not divide" in text
    cells = [[cell.strip() for cell in x.split("|")[1:-1]] for x in text.splitlines()]
    assert ["causal, 64k tokens a rank, cp 64", "91%", "90.0% projected", "missed"] in cells
    assert ["causal, 64k tokens a rank, cp 8", "95%", "96.0% measured", "reached"] in cells
    plot(rows, ahead, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
def test_a_kind_without_shares_has_no_panel(tmp_path):
    lines = [line("64k-gqa", OURS, 1, 500.0), line("pile-64k", OURS, 2, 480.0)]
    weak = {(one.workload, one.cp_size) for one in lines}
    plot(rows_of(lines, weak), [], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
    plot(rows_of(lines[1:], weak), [], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "markdown")]
    command = [sys.executable, str(TOOL), "--device", "cpu", *files, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_small_run_on_real_ranks(tmp_path):
    sizes = ("--cp", "1", "2", "4", "--tokens", "128", "64", "--rows", "32", "--strong", "512-gqa")
    plot_file = f"--plot={tmp_path / 'scaling.png'}"
    done = run(tmp_path, *sizes, "--methods", "split-kv", "--rounds", "1", plot_file)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "json").read_text())
    ran = [(row["workload"], row["cp_size"]) for row in report["rows"]]
    assert sorted(ran) == sorted(
        [*((name, n) for n in (1, 2, 4) for size in (64 * n, 128 * n)
           for name in (f"32-{size}", f"{size}-gqa", f"pile-{size}")),
         ("512-gqa", 1), ("512-gqa", 2)]
    )  # fmt: skip
    assert report["dropped"] == []
    assert all(row["step_ms"] > 0 and row["share"] > 0 for row in report["rows"])
    assert all(row["planned_imbalance"] >= 1.0 for row in report["rows"])
    assert {one["cp_size"] for one in report["checked"] if not one["is_fitted"]} == {4}
    assert max(one["cp_size"] for one in report["projected"]) == 1024
    assert done.stdout == (tmp_path / "markdown").read_text()
    assert (tmp_path / "scaling.png").exists()
    assert "cp 4: 512-gqa: round 1 of 1" in done.stderr


def test_a_run_that_is_ended_leaves_what_it_had(tmp_path):
    sizes = ["--cp", "1", "--tokens", "64", "--rows", "32", "--strong", "16k-gqa"]
    sizes += ["--budget-s", "1e5"]
    command = [sys.executable, str(TOOL), "--device", "cpu", f"--json={tmp_path / 'json'}", *sizes]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        said = ""
        while "16k-gqa: round 0" not in said:
            assert running.stderr is not None
            more = running.stderr.readline()
            assert more, said
            said += more
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 128 + signal.SIGTERM
        assert running.stderr.read() is not None  # the ranks, which hold it open, are gone
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    assert [row["workload"] for row in rows] == ["32-64", "64-gqa", "pile-64"]


def test_no_time_drops_everything_by_name(tmp_path):
    done = run(tmp_path, "--cp", "1", "--tokens", "128", "--strong", "--budget-s", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "json").read_text())["rows"] == []
    assert "not run within --budget-s 1: 128-gqa at cp 1" in done.stderr
    assert "- not run: pile-128 at cp 1" in done.stdout


def test_bad_options_are_one_line(tmp_path):
    done = run(tmp_path, "--strong", "64g")
    assert done.returncode == 2
    assert "'64g' must be one of 32k" in done.stderr
    done = run(tmp_path, "--device", "cuda")
    assert done.returncode == 2
    assert "torch finds no GPU" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("name", "route"), [("16k-gqa", "keys"), ("8k-16k", "queries")])
def test_what_is_fitted_travels_as_what_was_measured(name, route):
    workload = workload_of(name)
    assert plan_of(workload, 2).route == route
    assert SplitKV(workload, 2, SplitKVConfig()).plan == plan_of(workload, 2)
