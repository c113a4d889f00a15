"""Documents read backwards: what becomes of runs and ranges, and that rows and keys swap."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan import Causal, Full, Window, make_plan
from megatron_splitkv.plan.mirror import mirrored_ranges, mirrored_runs
from tests.packs import dense_mask, owner_of_tokens, packs, query_specs


def mirrored_tokens(lens: list[int], padded: list[int]) -> np.ndarray:
    """Where each token of the stream goes, `[num_tokens]`: pads stay."""
    places: list[int] = []
    for length, size in zip(lens, padded, strict=True):
        start = len(places)
        places += [start + length - 1 - p if p < length else start + p for p in range(size)]
    return np.asarray(places, dtype=np.int64)


def pads_of(lens: list[int], padded: list[int]) -> np.ndarray:
    """Which tokens of the stream are pads, `[num_tokens]`."""
    is_pad = [p >= length for length, size in zip(lens, padded, strict=True) for p in range(size)]
    return np.asarray(is_pad, dtype=bool)


def int64(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def ranges_of(is_member: np.ndarray) -> np.ndarray:
    """The longest ranges of members, `[n, 2]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_member.astype(np.int64), [0]])))
    return edges.astype(np.int64).reshape(-1, 2)


@settings(max_examples=150, deadline=None)
@given(packs("cwf"), st.integers(1, 6), st.integers(1, 9))
@example(([5], [8], Causal()), 2, 1)
@example(([], [], Causal()), 2, 1)
@example(([0, 0], [3, 0], Causal()), 2, 1)
def test_runs_place_mirrored_tokens(pack, cp_size, block_size):
    lens, padded, queries = pack
    plan = make_plan(lens, cp_size, queries=queries, padded_lens=padded, block_size=block_size)
    runs = mirrored_runs(plan.runs, int64(lens))
    assert runs.dtype == np.int64
    assert runs.tolist() == sorted(runs.tolist()), "ordered as those of a plan"
    for before, after in pairwise(runs.tolist()):
        assert [*before[:2], before[3]] != after[:3], "runs that touch are one"
    owner = np.full(plan.num_tokens, -1)
    starts = np.cumsum([0, *padded])
    for rank, doc, begin, end in runs.tolist():
        assert 0 <= begin < end <= padded[doc]
        there = owner[starts[doc] + begin : starts[doc] + end]
        assert (there == -1).all()
        there[:] = rank
    np.testing.assert_array_equal(owner, owner_of_tokens(plan)[mirrored_tokens(lens, padded)])
    np.testing.assert_array_equal(mirrored_runs(runs, int64(lens)), plan.runs)
    np.testing.assert_array_equal(plan.mirrored_runs, runs)


def test_runs_by_hand():
    """Five tokens and three pads: 0 to 4 are turned round, 5 to 7 are not."""
    lens = int64([5])
    runs = np.asarray([[0, 0, 0, 2], [0, 0, 4, 6], [1, 0, 2, 4], [1, 0, 6, 8]])
    expected = [[0, 0, 0, 1], [0, 0, 3, 6], [1, 0, 1, 3], [1, 0, 6, 8]]
    assert mirrored_runs(runs, lens).tolist() == expected
    assert mirrored_runs(mirrored_runs(runs, lens), lens).tolist() == runs.tolist()


@st.composite
def packs_with_members(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    """Lengths, padded lengths, and which tokens are members: real ones, and the pads between two
    of them in turn.
    """
    lens, padded, _ = draw(packs("c", max_length=12))
    chance = draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
    chosen = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random(sum(padded)) < chance
    members = chosen & ~pads_of(lens, padded)
    if draw(st.booleans()):
        real = np.flatnonzero(~pads_of(lens, padded))
        for before, after in pairwise(real.tolist()):
            members[before:after] |= members[before] and members[after]
    return lens, padded, members


@settings(max_examples=300, deadline=None)
@given(packs_with_members())
@example(([3, 3], [3, 3], np.asarray([0, 0, 1, 1, 0, 0], dtype=bool)))
@example(([3, 3], [3, 3], np.asarray([1, 0, 0, 0, 0, 1], dtype=bool)))
@example(([0, 2], [2, 2], np.asarray([0, 0, 1, 0], dtype=bool)))
def test_ranges_are_those_of_the_mirrored_tokens(case):
    lens, padded, is_member = case
    starts = np.concatenate([[0], np.cumsum(padded, dtype=np.int64)])
    real = is_member & ~pads_of(lens, padded)
    expected = ranges_of(real[mirrored_tokens(lens, padded)])
    found = mirrored_ranges(ranges_of(is_member), int64(lens), starts)
    assert found.dtype == np.int64
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([[1, 9]], [[0, 4], [10, 11]]),  # of the second document the first token, now the last
        ([[0, 5], [8, 11]], [[0, 5], [8, 11]]),
        ([[0, 11]], [[0, 5], [8, 11]]),
        ([[4, 5], [10, 11]], [[0, 1], [8, 9]]),
    ],
)
def test_pads_between_two_tokens_fall_out(ranges, expected):
    """A document of five tokens and three pads, then one of three tokens."""
    found = mirrored_ranges(np.asarray(ranges, dtype=np.int64), int64([5, 3]), int64([0, 8, 11]))
    assert found.tolist() == expected


@settings(max_examples=100, deadline=None)
@given(packs("cwf"), st.data())
@example(([7], [9], Window(3)), None)
@example(([7], [9], Full()), None)
def test_rows_and_keys_swap(pack, data):
    lens, padded, queries = pack
    if data is not None:
        queries = data.draw(query_specs(lens, "cwf"))
    mask = dense_mask(queries, lens, padded)
    turned = mirrored_tokens(lens, padded)
    np.testing.assert_array_equal(mask[np.ix_(turned, turned)].T, mask)
