"""The main job's script: its knobs, its checks before any process starts, and a small run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "long_context_gpt.sh"
SMALL = {
    "SEQ_LEN": "128",
    "TRAIN_ITERS": "20",
    "LAYERS": "1",
    "HIDDEN": "32",
    "HEADS": "2",
    "KV_HEADS": "1",
}


@pytest.fixture
def start(tmp_path):
    """Runs the script with knobs and arguments; returns status and output."""

    def run(*arguments, **knobs):
        environment = {**os.environ, **SMALL, "OUT": str(tmp_path / "out"), **knobs}
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture
def machine(tmp_path):
    """A Python that finds GPUs and kernels as it is told, and prints instead of training."""

    def make(num_gpus, has_kernels, has_te=0, has_apex=0):
        path = tmp_path / "python"
        path.write_text(
            "#!/usr/bin/env bash\n"
            'case "$*" in\n'
            f"*device_count*) echo {num_gpus} {has_kernels} {has_te} {has_apex} ;;\n"
            '*torch.distributed.run*) echo "devices=${CUDA_VISIBLE_DEVICES-all} $*" ;;\n'
            f'*) exec "{sys.executable}" "$@" ;;\n'
            "esac\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.txt").write_text("the quick brown fox " * (index % 7 + 1))
    return folder


def losses(log):
    return [float(x) for x in re.findall(r"lm loss: (\S+)", log)]


def test_trains_over_two_ranks_and_passes_arguments_on(start, texts):
    status, log = start("--log-interval", "1", DATA=str(texts), CP="2")
    assert status == 0, log
    assert log.count("splitkv: impl=splitkv cp=2") == 1
    found = losses(log)
    assert len(found) == 20
    assert found[-1] < found[0] - 0.5
    status, log = start(DATA=str(texts), CP="1", IMPL="megatron", PACKED="0", TRAIN_ITERS="2")
    assert status == 0, log
    assert "data: reusing 40 documents" in log
    assert "splitkv: impl=" not in log


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"DATA": "/no/such/folder"}, "/no/such/folder is not a folder; set DATA"),
        ({"SEQ_LEN": "99999996"}, "tokens and one sequence needs 99999997; set DATA"),
        ({"CP": "abc"}, "CP=abc must be a whole number, 1 or more"),
        ({"CP": "0"}, "CP=0 must be a whole number"),
        ({"TP": "08"}, "TP=08 must be a whole number"),
        ({"SEQ_LEN": "10k"}, "SEQ_LEN=10k must be a whole number"),
        ({"NPROC": "0"}, "NPROC=0 must be a whole number"),
        ({"GLOBAL_BATCH": "-2"}, "GLOBAL_BATCH=-2 must be a whole number"),
        ({"MAX_BYTES": "1e6"}, "MAX_BYTES=1e6 must be a whole number"),
        ({"PACKED": "yes"}, "PACKED=yes must be 0 or 1; unset it"),
        ({"BACKEND": "mpi"}, "BACKEND=mpi must be nccl or gloo; unset it"),
        (
            {"CP": "2", "TP": "2", "NPROC": "6"},
            "NPROC=6 must be a multiple of TP*PP*CP=4; set NPROC=8, or change TP*PP*CP",
        ),
        ({"HEADS": "3", "KV_HEADS": "2"}, "HEADS=3 must be a multiple of KV_HEADS=2; set HEADS=4"),
        ({"HIDDEN": "30"}, "HIDDEN=30 must be a multiple of 2*HEADS=4; set HIDDEN=32"),
        ({"PP": "2", "LAYERS": "3"}, "LAYERS=3 must be a multiple of PP=2; set LAYERS=4"),
        (
            {"CP": "2", "SEQ_LEN": "126"},
            "SEQ_LEN=126 must be a multiple of 2*CP=4; set SEQ_LEN=128",
        ),
        ({"TP": "4"}, "HEADS=2 must be a multiple of TP=4; set HEADS=4"),
        (
            {"TP": "2", "HEADS": "12", "HIDDEN": "48", "KV_HEADS": "3"},
            "KV_HEADS=3 must be a multiple of TP=2; set KV_HEADS=4",
        ),
        ({"TP": "2", "CP": "1", "SEQ_LEN": "127"}, "SEQ_LEN=127 must be a multiple of TP*CP=2"),
        (
            {"MICRO_BATCH": "2", "GLOBAL_BATCH": "3"},
            "GLOBAL_BATCH=3 must be a multiple of MICRO_BATCH*(NPROC/(TP*PP*CP))=2",
        ),
    ],
)
def test_bad_knobs_are_named_before_torchrun_starts(start, machine, knobs, message):
    status, log = start(PYTHON=machine(0, 0), **knobs)
    assert status == 2
    assert message in log
    assert len(log.splitlines()) == 1


@pytest.mark.parametrize(
    ("has_kernels", "impl", "is_cpu"),
    [(0, "splitkv", True), (1, "splitkv", False), (0, "megatron", False)],
)
def test_gpus_without_kernels_are_left_alone(start, machine, texts, has_kernels, impl, is_cpu):
    status, log = start(DATA=str(texts), PYTHON=machine(2, has_kernels), IMPL=impl)
    assert status == 0, log
    said = "this build of megatron_splitkv has no CUDA kernels: CPU mode, although there are 2 GPUs"
    assert (said in log) == is_cpu
    assert ("devices= " in log) == is_cpu
    assert ("--bf16" in log) == (not is_cpu)
    assert "--nproc-per-node 2" in log


def test_more_processes_than_gpus(start, machine):
    status, log = start(PYTHON=machine(2, 1), CP="4")
    assert status == 2
    way_out = "lower TP, PP or CP, or have processes share a GPU with BACKEND=gloo"
    assert log == f"NPROC=4 must be at most the 2 GPUs of this machine; {way_out}\n"


def test_processes_share_a_gpu_over_gloo(start, machine, texts):
    status, log = start(DATA=str(texts), PYTHON=machine(1, 1), CP="2", BACKEND="gloo")
    assert status == 0, log
    assert "--nproc-per-node 2" in log
    assert "--distributed-backend gloo --splitkv-transport gloo" in log


@pytest.mark.parametrize(("has_te", "has_apex"), [(0, 0), (1, 0), (1, 1)])
def test_what_needs_a_missing_package_is_off(start, machine, texts, has_te, has_apex):
    python = machine(1, 1, has_te, has_apex)
    status, log = start(DATA=str(texts), PYTHON=python, CP="1")
    assert status == 0, log
    assert ("--transformer-impl local" in log) == (not has_te)
    assert ("--no-gradient-accumulation-fusion" in log) == (not has_apex)


def test_default_batch_is_two_passes(start, machine, texts):
    status, log = start(DATA=str(texts), PYTHON=machine(0, 0), MICRO_BATCH="3", CP="1", NPROC="2")
    assert status == 0, log
    assert "--global-batch-size 12 " in log


def test_empty_folder_is_named_before_torchrun_starts(start, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    status, log = start(DATA=str(empty))
    assert status == 2
    assert f"{empty} holds no text" in log
    assert "torch" not in log


def test_every_knob_is_explained():
    text = SCRIPT.read_text()
    knobs = text[text.index("# ---- knobs") : text.index("# -----------", 400)]
    lines = [line for line in knobs.splitlines() if re.match(r"[A-Z_]+=", line)]
    assert len(lines) >= 15
    assert all("#" in line for line in lines)
