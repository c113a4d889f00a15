"""Turns a folder of text into a Megatron indexed dataset of byte tokens.

Every file is one document: its bytes (ids 0 to 255), then the end-of-document id 256. The result,
PREFIX.bin and PREFIX.idx, is what `--data-path PREFIX` takes with `--tokenizer-type NullTokenizer
--vocab-size 257`. PREFIX is printed on standard output. Its name depends on the files, their sizes
and their times, so a second call on the same text finds the dataset and starts in no time.
"""

import argparse
import hashlib
import json
import logging
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

import numpy as np
from rich.console import Console
from rich.progress import track

END_OF_DOCUMENT = 256
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".json", ".html", ".tex")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One document: where it is, how many of its bytes count, and when it was last written."""

    path: Path
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Files that are taken, and what the limit left out: files, bytes, the end of a file."""

    files: Sequence[TextFile]
    num_left_out: int
    bytes_left_out: int
    is_cut: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares the data; returns the exit status, 2 after a message on standard error."""
    options = parse(argv)
    try:
        print(prepare(options))
    except (OSError, ValueError) as error:
        print(f"prepare_text: {error}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--input",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of text files, searched with its subfolders (default: the sources of this "
        "Python's standard library)",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the dataset")
    parser.add_argument(
        "--suffixes",
        default=",".join(TEXT_SUFFIXES),
        help="file endings that count as text (default: %(default)s)",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=32 << 20,
        help="leave out files that go beyond this many bytes of text in all, and say so; where "
        "not even one fits, the first is cut (default: %(default)s)",
    )
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=1,
        help="fail if there are fewer tokens; a sequence takes its length and one more "
        "(default: %(default)s)",
    )
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> Path:
    """Writes the dataset unless it is there; returns its prefix.

    Raises:
        OSError: a file cannot be read, or the output cannot be written.
        ValueError: the folder holds no text, or too little.
    """
    console = Console(stderr=True, highlight=False)
    suffixes = tuple(suffix.strip() for suffix in options.suffixes.split(","))
    selection = find_files(options.input, suffixes, options.max_bytes)
    files = selection.files
    num_tokens = sum(file.num_bytes for file in files) + len(files)
    if num_tokens < options.min_tokens:
        raise ValueError(
            f"{options.input} holds {num_tokens} tokens and one sequence needs "
            f"{options.min_tokens}; set DATA to a folder with more text, SEQ_LEN to less"
            f"{', or MAX_BYTES to more' if selection.bytes_left_out else ''}"
        )
    if selection.bytes_left_out:
        console.print(left_out_line(selection, options.max_bytes), soft_wrap=True)
    prefix = options.output / f"text-{fingerprint(files)}"
    found = Path(f"{prefix}.idx").exists()  # written last
    if not found:
        options.output.mkdir(parents=True, exist_ok=True)
        write_dataset(files, prefix, console)
    console.print(
        f"data: {'reusing' if found else 'wrote'} {len(files)} documents, {num_tokens} tokens, "
        f"from {options.input}",
        soft_wrap=True,
    )
    return prefix


def find_files(folder: Path, suffixes: tuple[str, ...], max_bytes: int) -> Selection:
    """Lists the text files under a folder in a fixed order, up to a number of bytes.

    Hidden folders, caches and installed packages are left out. A file is taken whole, except where
    none would fit: then the first is cut.

    Raises:
        OSError: a file cannot be looked at.
        ValueError: the folder does not exist, holds no file with text in it or a broken link, or
            the limit is below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"--max-bytes={max_bytes} must be at least 1; set MAX_BYTES to more")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; set DATA to a folder of text files")
    found = [
        text_file(path) for path in sorted(folder.rglob("*")) if counts(path, folder, suffixes)
    ]
    texts = [file for file in found if file is not None]
    if not texts:
        raise ValueError(
            f"{folder} holds no text: no file that is not empty ends in {', '.join(suffixes)}; set "
            "DATA to a folder of such files"
        )
    files, total = [], 0
    for file in texts:
        if file.num_bytes <= max_bytes - total:
            files.append(file)
            total += file.num_bytes
    is_cut = not files
    if is_cut:
        files = [replace(texts[0], num_bytes=max_bytes)]
        total = max_bytes
    return Selection(
        files=files,
        num_left_out=len(texts) - len(files),
        bytes_left_out=sum(file.num_bytes for file in texts) - total,
        is_cut=is_cut,
    )


def counts(path: Path, folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a path below a folder has a name that is taken for text."""
    inner = path.relative_to(folder).parts
    skipped = any(part in ("__pycache__", "site-packages") or part[0] == "." for part in inner)
    return path.suffix in suffixes and not skipped


def text_file(path: Path) -> TextFile | None:
    """Looks at a file; None if it is empty, or no file.

    Raises:
        OSError: it cannot be looked at.
        ValueError: it is a broken link, which is not left out in silence.
    """
    try:
        status = path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise ValueError(
            f"{path} is a broken link ({error.strerror}); remove it, or set DATA to another folder"
        ) from error
    if not S_ISREG(status.st_mode) or status.st_size == 0:
        return None
    return TextFile(path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def left_out_line(selection: Selection, max_bytes: int) -> str:
    """What the limit cost."""
    count = selection.num_left_out
    parts = [f"the end of {selection.files[0].path}"] if selection.is_cut else []
    parts += [f"{count} file{'s' * (count != 1)}"] if count else []
    return (
        f"data: left out {' and '.join(parts)} ({selection.bytes_left_out} bytes) beyond "
        f"--max-bytes={max_bytes}; set MAX_BYTES to more to take all"
    )


def fingerprint(files: Sequence[TextFile]) -> str:
    """A short name for a list of files that changes when one of them does."""
    listing = json.dumps([(str(f.path.resolve()), f.num_bytes, f.modified_ns) for f in files])
    return hashlib.sha256(listing.encode()).hexdigest()[:12]


def write_dataset(files: Sequence[TextFile], prefix: Path, console: Console) -> None:
    """Writes PREFIX.bin, and PREFIX.idx when all of it is there.

    Raises:
        OSError: a file cannot be read, or the output cannot be written.
        ValueError: a file changed while we worked.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):  # Megatron's notices about missing GPU packages
        import torch
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(END_OF_DOCUMENT + 1))
    quiet = not console.is_terminal
    for file in track(files, "reading text", console=console, transient=True, disable=quiet):
        with file.path.open("rb") as stream:
            ids = np.frombuffer(stream.read(file.num_bytes), dtype=np.uint8).astype(np.int32)
        is_whole = len(ids) == file.num_bytes
        if not is_whole or file.path.stat().st_mtime_ns != file.modified_ns:
            raise ValueError(f"{file.path} changed while it was read; run again")
        document = torch.from_numpy(np.append(ids, np.int32(END_OF_DOCUMENT)))
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx.part")
    Path(f"{prefix}.idx.part").rename(f"{prefix}.idx")


if __name__ == "__main__":
    sys.exit(main())
