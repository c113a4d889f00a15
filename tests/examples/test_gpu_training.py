"""The example on GPUs, in bf16 over NCCL: 100 steps at each parallelism beside one GPU."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "long_context_gpt.sh"
STEPS = 100
MODEL = {"SEQ_LEN": "8192", "LAYERS": "6", "HIDDEN": "512", "HEADS": "8", "KV_HEADS": "2"}
ALL_RECOMPUTED = (
    "--recompute-granularity", "full", "--recompute-method", "uniform",
    "--recompute-num-layers", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains and returns the loss of each step; batches and seed are the same for all."""
    out = tmp_path_factory.mktemp("example")

    def run(*arguments: str, **knobs: str) -> list[float]:
        environment = {
            **os.environ,
            **MODEL,
            "OUT": str(out),
            "GLOBAL_BATCH": "2",
            "TRAIN_ITERS": str(STEPS),
            "NCCL_NVLS_ENABLE": "0",
            **knobs,
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), "--log-interval", "1", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        losses = [float(x) for x in re.findall(r"lm loss: (\S+)", done.stdout)]
        assert len(losses) == STEPS
        return losses

    return run


@pytest.fixture(scope="module")
def one_gpu(train) -> list[float]:
    return train(CP="1", IMPL="megatron", PACKED="0")


@pytest.fixture(scope="module")
def packed_on_one_gpu(train) -> list[float]:
    return train(CP="1")


def check_close(losses: list[float], expected: list[float]) -> None:
    """Step 1 within the rounding of bf16; later ones within what rounding grows to."""
    deviations = [abs(a / b - 1.0) for a, b in zip(losses, expected, strict=True)]
    print(
        f"loss {expected[0]:.4f} to {expected[-1]:.4f}; relative deviation: step 1 "
        f"{deviations[0]:.1e}, mean {sum(deviations) / STEPS:.1e}, largest {max(deviations):.1e}"
    )
    assert deviations[0] < 1e-3
    assert sum(deviations) / STEPS < 1e-2
    assert abs(sum(losses[-20:]) / sum(expected[-20:]) - 1.0) < 1e-2


@pytest.mark.gpu
def test_one_gpu_equals_megatron(train, one_gpu) -> None:
    """Against Megatron's own attention, which is dense there: documents are not told apart."""
    check_close(train(CP="1", PACKED="0"), one_gpu)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("knobs", "arguments"),
    [
        ({"CP": "2"}, ()),
        ({"CP": "2"}, ("--splitkv-keep-queries", "--use-distributed-optimizer")),
        ({"CP": "2"}, ALL_RECOMPUTED),
        ({"CP": "1", "TP": "2"}, ()),
        ({"CP": "1", "PP": "2"}, ()),
    ],
    ids=["cp2", "cp2-kept-queries-distributed-optimizer", "cp2-recompute", "tp2", "pp2"],
)
def test_two_gpus_follow_one(train, packed_on_one_gpu, knobs, arguments) -> None:
    check_close(train(*arguments, **knobs), packed_on_one_gpu)
