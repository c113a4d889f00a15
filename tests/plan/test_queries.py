"""Closed forms of the query specs against dense masks."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_splitkv.plan import (
    Anchors,
    Causal,
    Full,
    Suffix,
    Window,
    is_self_attention,
    make_plan,
    plan_exchange,
)
from megatron_splitkv.plan.queries import build_model, rows_per_unit
from tests.packs import dense_mask, packs


def document_of(starts: np.ndarray, doc: int) -> slice:
    return slice(int(starts[doc]), int(starts[doc + 1]))


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@settings(max_examples=300, deadline=None)
@given(packs())
@example(([5, 1, 0, 3], [5, 1, 0, 3], Anchors(((0, 0, 5, 5), (1,), (0, 0), ()), 3)))
@example(([7], [9], Window(7)))
@example(([7, 2], [7, 4], Suffix(3)))
def test_row_intervals_equal_the_dense_mask(pack):
    lens, padded, queries = pack
    model = build_model(queries, lens, padded)
    mask = dense_mask(queries, lens, padded)
    assert (model.num_rows, model.num_tokens) == mask.shape
    token = np.arange(mask.shape[1])
    begin, end = np.split(model.row_intervals(), 2, axis=1)
    np.testing.assert_array_equal((begin <= token) & (token < end), mask)


@settings(max_examples=200, deadline=None)
@given(packs(), st.data())
def test_pairs_in_any_range_equal_the_dense_count(pack, data):
    lens, padded, queries = pack
    model = build_model(queries, lens, padded)
    mask = dense_mask(queries, lens, padded)
    starts = starts_of(padded)
    for doc in range(len(lens)):
        seen = mask[:, document_of(starts, doc)]
        begin = data.draw(st.integers(0, padded[doc]))
        end = data.draw(st.integers(begin, padded[doc]))
        assert model.pairs_in(doc, begin, end) == seen[:, begin:end].sum()
        assert model.pairs_in(doc, 0, padded[doc]) == seen.sum()


def test_areas_beyond_32_bits_are_exact():
    length = 100_000
    causal = build_model(Causal(), [length], [length])
    assert causal.pairs_in(0, 0, length) == 5_000_050_000
    long = 1 << 22
    assert build_model(Full(), [long], [long]).pairs_in(0, 0, long) == 1 << 44
    assert build_model(Window(1 << 20), [long], [long]).pairs_in(0, 0, 1) == 1 << 20
    anchors = Anchors(((long,) * 512,), 1024)
    assert build_model(anchors, [long], [long]).pairs_in(0, 0, long) == 1 << 41


@pytest.mark.parametrize("size", [64, 1 << 31, (1 << 63) - 1])
def test_a_window_beyond_the_document_is_causal(size):
    """Also where position plus size leaves 64 bits."""
    causal, window = (
        make_plan([64, 5], 4, queries=q, block_size=4) for q in (Causal(), Window(size))
    )
    assert window.costs == causal.costs
    np.testing.assert_array_equal(plan_exchange(window).counts, plan_exchange(causal).counts)
    np.testing.assert_array_equal(window.model().row_intervals(), causal.model().row_intervals())
    endless = make_plan([64, 5], 4, queries=Suffix(size), block_size=4)
    assert sum(endless.query_rows) == 69
    assert endless.costs == causal.costs


def test_early_causal_keys_are_dear():
    model = build_model(Causal(), [100], [100])
    assert model.pairs_in(0, 0, 10) == 955  # n (L - s) - n (n - 1) / 2
    assert model.pairs_in(0, 90, 100) == 55


def test_kinds():
    assert all(is_self_attention(spec) for spec in (Causal(), Window(3), Full()))
    anchors = Anchors(((1,),), 16)
    assert not is_self_attention(Suffix(3))
    assert not is_self_attention(anchors)
    assert [rows_per_unit(spec) for spec in (Causal(), Suffix(3), anchors)] == [1, 1, 16]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), "window size=0 must be at least 1 key (the row itself)"),
        (lambda: Suffix(-1), "suffix num_rows=-1 must be at least 1"),
        (lambda: Anchors(((1,),), 0), "rows_per_anchor=0 must be at least 1"),
        (
            lambda: build_model(Causal(), [3, -1], [3, 3]),
            "document 1 has length -1 and padded length 3; lengths are not negative and padding "
            "only adds tokens",
        ),
        (
            lambda: build_model(Causal(), [5], [4]),
            "document 0 has length 5 and padded length 4",
        ),
        (
            lambda: build_model(Causal(), [5, 5], [5]),
            "padded_lens has 1 documents, doc_lens has 2; both describe the same pack",
        ),
        (
            lambda: build_model(Anchors(((1,),), 2), [5, 5], [5, 5]),
            "anchors are given for 1 documents, but there are 2; give one list for each document",
        ),
        (
            lambda: build_model(Anchors(((6,),), 2), [5], [8]),
            "anchor position 6 of document 0 must ascend and lie in [0, 5]",
        ),
        (
            lambda: build_model(Anchors(((), (4, 3)), 2), [5, 5], [5, 5]),
            "anchor position 3 of document 1 must ascend and lie in [0, 5]; sort the anchors",
        ),
        (
            lambda: build_model(Anchors(((-1,),), 2), [5], [5]),
            "anchor position -1 of document 0 must ascend",
        ),
    ],
)
def test_bad_input_says_what_and_how(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_planning_imports_no_torch():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_splitkv.plan import make_plan\n"
        "import megatron_splitkv.plan.report, megatron_splitkv.plan.exchange\n"
        "print(make_plan([9, 7], 2).tokens)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "(8, 8)"
