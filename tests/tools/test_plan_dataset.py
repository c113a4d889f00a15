"""`plan_blocks.py --idx`: the packs that Megatron's own dataset serves."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")
from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from megatron_splitkv.plan import make_plan

TOOL = Path(__file__).resolve().parents[2] / "tools/plan_blocks.py"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """Documents whose every token is the number of its document."""
    path = str(tmp_path_factory.mktemp("data") / "text")
    builder = IndexedDatasetBuilder(get_bin_path(path), dtype=np.int32)
    for document, length in enumerate([700, 5, 1300, 64, 333, 12, 2000, 90]):
        builder.add_document(torch.full((length,), document), [length])
    builder.finalize(get_idx_path(path))
    return path


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_packs_are_those_of_training(prefix):
    """The dataset is asked once by the tool, and once here, for the lengths of its tokens."""
    options = ("--seq-length", "512", "--samples", "20", "--packs", "4", "--seed", "77")
    run = run_tool("--idx", prefix, *options, "--cp", "2", "--json", "--pack", "3")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import plan_dataset as p, torch\n"
        "got = p.first_samples(sys.argv[2], sequence_length=512, num_samples=20, num_packs=4,"
        " seed=77, split='100,0,0')\n"
        "import json; print('\\n' + json.dumps(got))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(TOOL.parent), prefix],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    packs = json.loads(other.stdout.splitlines()[-1])
    assert [sum(pack) for pack in packs] == [512] * 4
    assert len({tuple(pack) for pack in packs}) > 1
    plans = [make_plan(pack, 2, tolerance=0.001, route="keys").fingerprint for pack in packs]
    assert [entry["fingerprint"] for entry in found["packs"]] == plans
    assert found["fingerprint"] == plans[2]


def test_no_more_packs_than_training_samples(prefix):
    options = ("--seq-length", "512", "--samples", "3", "--packs", "6", "--cp", "2", "--json")
    run = run_tool("--idx", prefix, *options)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["packs"]) == 3


def test_a_file_that_is_no_index_is_named(tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"text{suffix}").write_text("hello")
    run = run_tool("--idx", str(tmp_path / "text"), "--samples", "5", "--cp", "2")
    assert run.returncode == 2
    assert "text.idx is no index of a Megatron dataset" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--idx", "nowhere/text", "--samples", "5"), "nowhere/text.idx is not there"),
        (("--idx", "nowhere/text"), "--idx needs --samples N"),
        (("--idx", "nowhere/text", "--split", "most"), "'most' must be up to three shares"),
        (("--idx", "nowhere/text", "--split", "0,0,0"), "'0,0,0' must be up to three shares"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    run = run_tool(*arguments, "--cp", "2")
    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1]
