"""Packs of documents for the planner's tools: files, Megatron datasets, named distributions."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

Pack = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Document lengths `exp(N(mu, sigma))`, at most a share of the pack."""

    mu: float
    sigma: float
    longest: int
    about: str

    def draw(self, rng: np.random.Generator) -> int:
        return min(self.longest, max(1, round(math.exp(rng.normal(self.mu, self.sigma)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Document lengths uniform inside bins: pairs of an upper edge and a probability."""

    bins: tuple[tuple[int, float], ...]
    about: str

    def draw(self, rng: np.random.Generator) -> int:
        weights = np.asarray([weight for _, weight in self.bins])
        chosen = int(rng.choice(len(self.bins), p=weights / weights.sum()))
        low = self.bins[chosen - 1][0] if chosen else 0
        return int(rng.integers(low + 1, self.bins[chosen][0] + 1))


# Parameters published with long-context data sets and context-parallel systems.
DISTRIBUTIONS: dict[str, Lognormal | Histogram] = {
    "prolong": Lognormal(
        mu=7.68, sigma=0.74, longest=340_000, about="lognormal fit of 78 k ProLong documents"
    ),
    "wlb": Lognormal(
        mu=7.80, sigma=1.06, longest=125_000, about="lognormal fit of the WLB-LLM length file"
    ),
    "trajectories": Lognormal(
        mu=9.7, sigma=0.8, longest=131_072, about="agent trajectories, up to 128 K tokens"
    ),
    "varlen": Lognormal(
        mu=8.318 - 1.1**2 / 2, sigma=1.1, longest=8192, about="Megatron's mock variable lengths"
    ),
    "web": Histogram(
        bins=(
            (200, 18.6), (500, 28.2), (1024, 24.6), (2048, 15.7), (4096, 7.3), (8192, 3.1),
            (16384, 1.3), (32768, 0.85), (65536, 0.14), (131072, 0.17), (196608, 0.14),
        ),
        about="bins of 13 million web documents",
    ),
}  # fmt: skip
INDEX_MAGIC = b"MMIDIDX\x00\x00"  # first bytes of a Megatron .idx file
LONGEST_SHARE = 4  # no drawn document is longer than a quarter of its pack


def draw_pack(name: str, num_tokens: int, rng: np.random.Generator) -> Pack:
    """Documents of a named distribution that fill `num_tokens`; the last one is cut.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"distribution {name!r} is unknown; use {', '.join(DISTRIBUTIONS)}")
    lengths: list[int] = []
    left = num_tokens
    while left > 0:
        length = DISTRIBUTIONS[name].draw(rng)
        lengths.append(min(left, length, max(1, num_tokens // LONGEST_SHARE)))
        left -= lengths[-1]
    return tuple(lengths)


def read_packs(path: Path) -> list[Pack]:
    """Packs in a file: one list of lengths or several in JSON or npy, one pack a line in CSV.

    Raises:
        ValueError: no such format, or an entry that is no length; names the line or the entry.
        OSError: the file cannot be read.
    """
    readers = {".json": _read_json, ".csv": _read_csv, ".npy": _read_npy}
    if path.suffix not in readers:
        raise ValueError(f"{path}: use a file that ends in {', '.join(readers)}")
    try:
        packs = list(readers[path.suffix](path))
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not any(packs):
        raise ValueError(f"{path}: holds no lengths")
    return packs


def _is_length(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return value.is_integer() and value >= 0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _pack(values: Sequence[object], where: str) -> Pack:
    """Whole, non-negative numbers; numbers with a zero fraction are whole."""
    lengths: list[int] = []
    for i, value in enumerate(values):
        if not _is_length(value):
            raise ValueError(
                f"{where}, entry {i + 1}: {value!r} is no document length (a whole number of "
                "tokens, at least 0)"
            )
        lengths.append(int(value))
    return tuple(lengths)


def _read_json(path: Path) -> Iterator[Pack]:
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    if not isinstance(data, list):
        raise ValueError(f"{path}: must be a list of lengths, or a list of such lists")
    if not any(isinstance(entry, list) for entry in data):
        yield _pack(data, str(path))
        return
    for i, entry in enumerate(data):
        if not isinstance(entry, list):
            raise ValueError(f"{path}: entry {i + 1} is {entry!r}, but others are lists")
        yield _pack(entry, f"{path}, pack {i + 1}")


def _read_csv(path: Path) -> Iterator[Pack]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip().rstrip(",")
        if not text:
            continue
        values: list[object] = []
        for field in text.split(","):
            try:
                values.append(int(field))
            except ValueError:
                values.append(field.strip())
        yield _pack(values, f"{path}, line {number}")


def _read_npy(path: Path) -> Iterator[Pack]:
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if array.ndim not in (1, 2):
        raise ValueError(f"{path}: must be [documents] or [packs, documents], got {array.shape}")
    for i, row in enumerate(np.atleast_2d(array)):
        yield _pack(row.tolist(), f"{path}, pack {i + 1}")


def packs_of_dataset(
    prefix: str, *, sequence_length: int, num_samples: int, num_packs: int, seed: int, split: str
) -> list[Pack]:
    """The first packs that training would see of a Megatron dataset, with document masking.

    Megatron's own dataset builds them, so they are exact for the same seed, sequence length,
    number of training samples and split. Needs megatron-core; the index cache goes to a temporary
    folder.

    Args:
        prefix: path of the dataset without `.idx` and `.bin`.
        sequence_length: tokens of a sample.
        num_samples: training samples of the whole run: iterations times global batch size.
        num_packs: samples to return, in training order; no more than training sees.
        seed: `--seed` of the run.
        split: `--split` of the run.
    Raises:
        ValueError: megatron-core is not installed, or there is no such dataset.
    """
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise ValueError(f"{prefix}{suffix} is not there; give the path without .idx")
    with Path(prefix + ".idx").open("rb") as file:
        if file.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise ValueError(f"{prefix}.idx is no index of a Megatron dataset")
    try:
        from plan_dataset import first_samples
    except ImportError as error:
        raise ValueError(
            f"--idx needs megatron-core ({error}); pip install megatron-core==0.19.2"
        ) from None
    return first_samples(
        prefix,
        sequence_length=sequence_length,
        num_samples=num_samples,
        num_packs=num_packs,
        seed=seed,
        split=split,
    )
