"""One small dataset of real text for all jobs: short documents with a long tail."""

import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.mcore.jobs import ROOT


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of an indexed dataset of a few hundred documents of 3 to about 1000 bytes."""
    folder = tmp_path_factory.mktemp("text")
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:60_000]
    lengths, start, number = random.Random(0), 0, 0
    while start < len(text):
        length = max(3, int(lengths.lognormvariate(4.2, 1.0)))
        folder.joinpath(f"{number:04d}.txt").write_text(text[start : start + length])
        start, number = start + length, number + 1
    script = ROOT / "examples" / "prepare_text.py"
    command = [sys.executable, str(script), "--input", str(folder), "--output", str(folder / "out")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
