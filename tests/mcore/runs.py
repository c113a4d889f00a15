"""Toy training runs through the launcher, as a user starts them, and what they print."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SEQ_LENGTH = 256
ITERATIONS = 3

_STEP = re.compile(r"iteration\s+\d+/.*lm loss: (\S+) .*grad norm: (\S+) ")
_WORDS = ("key", "value", "query", "merge", "rank", "row", "block", "plan", "of", "the", "a", "to")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: exit status, everything it printed, and its loss curve."""

    status: int
    output: str

    @property
    def losses(self) -> list[float]:
        """Loss of each iteration."""
        return [float(loss) for loss, _ in _STEP.findall(self.output)]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each iteration."""
        return [float(norm) for _, norm in _STEP.findall(self.output)]

    def line(self, start: str) -> str:
        """The one line of the output that starts so."""
        (line,) = [line for line in self.output.splitlines() if line.startswith(start)]
        return line


def write_texts(folder: Path, *, num_files: int = 120, seed: int = 1) -> Path:
    """Fills a folder with small texts whose lengths have a long tail."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num_files):
        num_words = int(rng.paretovariate(1.1) * 3) % 400 + 1
        text = " ".join(rng.choice(_WORDS) for _ in range(num_words))
        (folder / f"{index:04d}.txt").write_text(text)
    return folder


def write_dataset(folder: Path) -> Path:
    """A dataset of such texts; returns its prefix, for `--data-path`."""
    command = [sys.executable, str(EXAMPLES / "prepare_text.py"), "--output", str(folder / "data")]
    command += ["--input", str(write_texts(folder / "texts"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return Path(done.stdout.strip())


def launch(
    num_processes: int, script: Path, arguments: Sequence[str], *, timeout_s: float = 100
) -> Run:
    """Runs a script under torchrun and the launcher, on one thread for each process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_processes), "-m", "megatron_splitkv.launch"]
    command += [str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=timeout_s,
    )
    return Run(status=done.returncode, output=done.stdout)


def train(
    dataset: Path,
    num_processes: int,
    *arguments: str,
    script: Path = EXAMPLES / "pretrain_gpt.py",
) -> Run:
    """Trains a toy GPT with our example script; later arguments win over the toy's."""
    toy = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 "
        "--group-query-attention --num-query-groups 2 "
        f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} "
        f"--micro-batch-size 1 --global-batch-size 4 --train-iters {ITERATIONS} "
        "--lr 1e-2 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 "
        "--position-embedding-type rope --calculate-per-token-loss --split 100,0,0 "
        "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 514 "
        "--log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0"
    )
    data = ["--data-path", str(dataset), "--data-cache-path", str(dataset.parent / "cache")]
    return launch(num_processes, script, [*toy.split(), *data, *arguments])
