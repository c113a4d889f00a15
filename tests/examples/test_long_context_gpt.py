"""The main job's script: its knobs, its checks before any process starts, and a small run."""

import os
import re
import subprocess
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
        ({"SEQ_LEN": "99999999"}, "tokens and one sequence needs 100000000; set DATA"),
        ({"CP": "2", "TP": "2", "NPROC": "6"}, "NPROC=6 must be a multiple of TP*PP*CP=4"),
    ],
)
def test_bad_knobs_are_named_before_torchrun_starts(start, knobs, message):
    status, log = start(**knobs)
    assert status == 2
    assert message in log
    assert len(log.splitlines()) == 1


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
