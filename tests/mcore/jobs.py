"""Small training jobs through the launcher: real processes, real Megatron loop, and what came out.

A job's losses are read from Megatron's log, its gradients from Megatron's own dump of the first
step (`--save-wgrads-interval`, reduced over data- and context-parallel ranks).
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
SEQ_LENGTH = 240  # cuts evenly over 2, 3 and 4 ranks
TIMEOUT_S = 100

_VALIDATION = re.compile(r"validation loss at iteration .*? lm loss value: ([0-9.E+-]+) \|")
_LOSS = re.compile(r"\|\s*([a-z_0-9 ]*loss[a-z_0-9 ]*): ([0-9.E+-]+) \|")
_NUMBERS = re.compile(r"iteration\s+(\d+)/")

MODEL = (  # noqa: SIM905 (a command line reads better as one)
    "--hidden-size 32 --num-attention-heads 4 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 1024 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 4 "
    "--lr 3e-3 --lr-decay-style constant --lr-decay-iters 100 --weight-decay 0 --clip-grad 1.0 "
    "--calculate-per-token-loss --split 100,0,0 --eval-iters 0 --eval-interval 1000000 "
    "--log-interval 1 --num-workers 0 --seed 7 --save-interval 1000000 --save-wgrads-interval 1 "
    "--transformer-impl local --ckpt-format torch"
).split()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job left behind.

    Attributes:
        losses: for each logged loss, its value at each step; "validation" if there was any.
        folder: where Megatron saved; gradients lie below.
        log: all output.
    """

    losses: dict[str, list[float]]
    folder: Path
    log: str

    def gradients(self) -> dict[str, Tensor]:
        """First-step gradients by file, model chunk and parameter."""
        files = sorted(self.folder.glob("wgrads/iter_0000001/*.pth"))
        return {
            f"{file.stem}/{chunk}/{name}": value
            for file in files
            for chunk, values in torch.load(file).items()
            for name, value in values.items()
        }


def launch(
    arguments: Sequence[str],
    *,
    num_processes: int,
    script: Path = EXAMPLE,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, str]:
    """Runs the launcher on this machine, a process for each rank.

    Returns:
        The largest exit code (1 if a rank was still running at the end), and all output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "megatron_splitkv.launch", str(script), *arguments]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(num_processes)
    ]
    outputs, codes = [], []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout_s)[0])
            codes.append(process.returncode)
    except subprocess.TimeoutExpired as expired:
        outputs.append(f"TIMED OUT after {timeout_s} s\n{expired.stdout!r}")
        codes.append(1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return max(abs(code) for code in codes), "\n".join(outputs)


def train(
    folder: Path,
    data: Path,
    extra: str,
    *,
    cp: int = 1,
    impl: str = "splitkv",
    num_processes: int | None = None,
    iterations: int = 3,
    is_per_token_loss: bool = True,
) -> Result:
    """Trains the toy model for some steps and fails the test if the job fails.

    Args:
        folder: an empty folder for this job.
        data: prefix of an indexed dataset.
        extra: more Megatron arguments; later ones win.
        cp: context-parallel size.
        impl: context-parallel implementation.
        num_processes: all ranks; by default `cp`.
        iterations: optimizer steps.
        is_per_token_loss: divide by all loss tokens; else each rank by its own.
    """
    arguments = [
        *(word for word in MODEL if is_per_token_loss or word != "--calculate-per-token-loss"),
        *("--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "4"),
        *("--seq-length", str(SEQ_LENGTH), "--train-iters", str(iterations)),
        *("--context-parallel-impl", impl, "--context-parallel-size", str(cp)),
        *("--data-path", str(data), "--data-cache-path", str(data.parent / "cache")),
        *("--save", str(folder)),
        *extra.split(),
    ]
    code, log = launch(arguments, num_processes=num_processes or cp)
    assert code == 0, f"job failed with exit code {code}:\n{log[-20000:]}"
    return Result(losses=_losses(log), folder=folder, log=log)


def _losses(log: str) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {}
    if validation := [float(value) for value in _VALIDATION.findall(log)]:
        losses["validation"] = validation
    for line in log.splitlines():
        if _NUMBERS.search(line):
            for name, value in _LOSS.findall(line):
                losses.setdefault(name.strip(), []).append(float(value))
    return losses
