"""Checks: what passes, which rank is shown, what the reader sees."""

import io

import pytest
import torch
from rich.console import Console

from megatron_splitkv.checks.op_checks import section_of
from megatron_splitkv.checks.table import Check, failed, print_checks, worst_of_ranks


def check(value: float, **settings) -> Check:
    return Check(**{"section": "s", "name": "n", "value": value, "limit": 1.0} | settings)


@pytest.mark.parametrize(
    ("value", "bound", "is_ok"),
    [
        (1.0, "at most", True), (1.1, "at most", False), (1.0, "at least", True),
        (0.9, "at least", False), (float("nan"), "at most", False),
        (float("nan"), "at least", False), (float("inf"), "at most", False),
    ],
)  # fmt: skip
def test_limits(value, bound, is_ok):
    assert check(value, bound=bound).is_ok == is_ok


def test_a_check_that_could_not_be_made_fails():
    assert not failed("s", "n", "why").is_ok


@pytest.mark.parametrize(
    ("values", "bound", "worst"),
    [
        ((0.1, 3.0, 0.2), "at most", 3.0),
        ((5.0, 0.0, 9.0), "at least", 0.0),
        ((0.1, float("inf")), "at most", float("inf")),
    ],
)
def test_the_worst_rank_is_shown(values, bound, worst):
    (found,) = worst_of_ranks([[check(value, bound=bound)] for value in values])
    assert found.value == worst
    assert f"rank {values.index(worst)}" in found.note


def test_a_rank_that_knows_no_number_is_the_worst():
    (found,) = worst_of_ranks([[check(3.0)], [check(float("nan"))]])
    assert found.note == "rank 1"


def test_ranks_that_made_other_checks_are_refused():
    with pytest.raises(ValueError, match=r"different checks \(1, 2 each\)"):
        worst_of_ranks([[check(0.0)], [check(0.0), check(0.0)]])


def test_sections_do_not_name_a_rank_s_own_gpu():
    first, second = (section_of(torch.bfloat16, torch.device("cuda", rank)) for rank in (0, 1))
    assert first == second == "ops on cuda, bfloat16"


def test_the_last_line_names_failures():
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    print_checks([check(0.5), check(2.0, name="bad", note="[why]")], "t", console)
    assert "FAILED 1 of 2: s: bad" in stream.getvalue()
    assert "[why]" in stream.getvalue()
    print_checks([check(0.5)], "t", console)
    assert "all 1 checks passed" in stream.getvalue()
