"""Text to dataset: what goes in comes out, a second call reuses it, bad input says so."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.console import Console

SCRIPT = Path(__file__).parents[2] / "examples" / "prepare_text.py"
TEXTS = {"b.txt": b"second", "a.py": b"first \xff bytes", "deep/er/c.md": b"third"}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    for name, content in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def prepare(folder, output, *more):
    command = [sys.executable, str(SCRIPT), "--output", str(output), *more]
    command += [] if folder is None else ["--input", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def documents(prefix):
    dataset = IndexedDataset(str(prefix))
    return [dataset.get(index).tolist() for index in range(len(dataset))]


def test_documents_are_bytes_and_an_end(texts, tmp_path):
    for skipped in ("__pycache__/x.py", ".git/x.txt", "site-packages/x.py", "x.bin", "empty.txt"):
        (texts / skipped).parent.mkdir(exist_ok=True)
        (texts / skipped).write_bytes(b"" if skipped == "empty.txt" else b"not this")
    done = prepare(texts, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    expected = [[*TEXTS[name], 256] for name in sorted(TEXTS)]
    assert documents(done.stdout.strip()) == expected
    assert "wrote 3 documents" in done.stderr


def test_second_call_reuses_and_a_change_does_not(texts, tmp_path):
    first = prepare(texts, tmp_path / "out")
    written = Path(f"{first.stdout.strip()}.bin").stat().st_mtime_ns
    second = prepare(texts, tmp_path / "out")
    assert second.stdout == first.stdout
    assert "reusing 3 documents" in second.stderr
    assert Path(f"{first.stdout.strip()}.bin").stat().st_mtime_ns == written
    (texts / "b.txt").write_bytes(b"longer than before")
    third = prepare(texts, tmp_path / "out")
    assert third.stdout != first.stdout, "Megatron caches its sample index by this name"
    assert [*b"longer than before", 256] in documents(third.stdout.strip())


def test_interrupted_work_is_done_again(texts, tmp_path):
    prefix = prepare(texts, tmp_path / "out").stdout.strip()
    Path(f"{prefix}.idx").unlink()
    again = prepare(texts, tmp_path / "out")
    assert "wrote 3 documents" in again.stderr
    assert len(documents(prefix)) == 3


def test_limit_leaves_out_what_goes_beyond(texts, tmp_path):
    done = prepare(texts, tmp_path / "out", "--max-bytes", "20")
    assert documents(done.stdout.strip()) == [[*TEXTS[n], 256] for n in ("a.py", "b.txt")]
    assert "data: left out 1 file (5 bytes) beyond --max-bytes=20; set MAX_BYTES" in done.stderr
    assert "left out" not in prepare(texts, tmp_path / "out").stderr


def test_where_no_file_fits_the_first_is_cut(texts, tmp_path):
    first = prepare(texts, tmp_path / "out", "--max-bytes", "4")
    assert first.returncode == 0, first.stderr
    assert documents(first.stdout.strip()) == [[*b"firs", 256]]
    said = f"left out the end of {texts / 'a.py'} and 2 files (20 bytes) beyond --max-bytes=4"
    assert said in first.stderr
    second = prepare(texts, tmp_path / "out", "--max-bytes", "3")
    assert second.stdout != first.stdout


def test_a_file_that_changes_meanwhile_is_an_error(texts, tmp_path, monkeypatch):
    (texts / "b.txt").write_bytes(b"grown by now")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    prepare_text = importlib.import_module("prepare_text")
    seen = prepare_text.text_file(texts / "b.txt")
    os.utime(texts / "b.txt", ns=(0, 0))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"b.txt changed while it was read; run again"):
        prepare_text.write_dataset([seen], tmp_path / "out" / "text", Console(quiet=True))


def test_default_is_the_standard_library(tmp_path):
    done = prepare(None, tmp_path / "out", "--max-bytes", "200000")
    assert done.returncode == 0, done.stderr
    assert len(documents(done.stdout.strip())) > 5


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, (), "is not a folder; set DATA to a folder of text files"),
        ({}, (), "holds no text: no file that is not empty ends in .py"),
        ({"x.txt": b"abc"}, ("--max-bytes", "0"), "--max-bytes=0 must be at least 1"),
        ({"x.txt": b""}, (), "holds no text"),
        ({"x.bin": b"abc"}, (), "holds no text"),
        ({"x.txt": b"abc"}, ("--min-tokens", "5"), "holds 4 tokens and one sequence needs 5"),
    ],
)
def test_bad_input_is_one_line_and_a_status(tmp_path, content, arguments, message):
    folder = tmp_path / "texts"
    if content is not None:
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
    done = prepare(folder, tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("prepare_text: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user that file permissions hold for")
def test_unreadable_file(texts, tmp_path):
    (texts / "b.txt").chmod(0)
    done = prepare(texts, tmp_path / "out")
    assert done.returncode == 2
    assert "Permission denied" in done.stderr
    assert "b.txt" in done.stderr


@pytest.mark.parametrize("target", ["loop.txt", "gone.txt"])
def test_broken_link(texts, tmp_path, target):
    (texts / "loop.txt").symlink_to(texts / target)
    done = prepare(texts, tmp_path / "out")
    assert done.returncode == 2
    assert "loop.txt is a broken link (" in done.stderr
    assert "; remove it, or set DATA to another folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_little_text_after_a_limit_names_the_limit(texts, tmp_path):
    done = prepare(texts, tmp_path / "out", "--max-bytes", "20", "--min-tokens", "25")
    assert done.returncode == 2
    assert "SEQ_LEN to less, or MAX_BYTES to more" in done.stderr
