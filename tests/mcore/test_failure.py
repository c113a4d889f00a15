"""What is said about a failure: one line for a refusal, a traceback for the rest, never nothing."""

import json

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import arguments, failure, launch


def caught(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def refused():
    return caught(arguments.requested_impl, ["--context-parallel-impl", "ring"])


@pytest.fixture(autouse=True)
def rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


def test_a_refusal_is_one_line(capsys):
    failure.report(refused())
    expected = "--context-parallel-impl ring is unknown; choose one of megatron, splitkv"
    assert capsys.readouterr().err == f"splitkv: rank 1 of 2 failed: {expected}\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(), True),
        (caught(launch.check_megatron_version, "1.0"), True),
        (caught(int, "x"), False),  # a ValueError of somebody else's
        (caught(lambda: 1 / 0), False),
        (UnsupportedError("was never raised"), False),
    ],
)
def test_refusals_are_told_from_faults(error, expected):
    assert failure.is_refusal(error) is expected


def test_a_fault_keeps_its_traceback(capsys):
    failure.report(caught(int, "x"))
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith(
        "splitkv: rank 1 of 2 failed: invalid literal for int() with base 10: 'x'\n"
    )


def test_a_bare_assert_says_where():
    try:
        exec(compile("assert 1 == 2", __file__, "exec"), {})
    except AssertionError as error:
        text = failure.message(error)
    assert text.startswith(f"AssertionError() at {__file__}:1: ")
    assert failure.message(KeyboardInterrupt()) == "KeyboardInterrupt()"


@pytest.mark.parametrize(("error", "lines"), [(refused(), 1), (caught(int, "x"), 4)])
def test_torchrun_reads_the_message(tmp_path, monkeypatch, capsys, error, lines):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    failure.report(error)
    read = ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=str(path))
    assert read.message["message"] == str(error)
    shown = read.message["extraInfo"]["py_callstack"].splitlines()
    assert len(shown) >= lines
    assert shown[-1] == f"splitkv: rank 1 of 2 failed: {error}"
    assert read.timestamp > 0
    assert "py_callstack" in json.loads(path.read_text())["message"]["extraInfo"]


def test_an_error_file_that_cannot_be_written_hides_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    failure.report(refused())
    said = capsys.readouterr().err
    assert "ring is unknown" in said
    assert "torchrun's error file" in said
