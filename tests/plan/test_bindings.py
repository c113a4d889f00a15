"""`_planner` does not trust what it is handed: every array, index and size is checked."""

import numpy as np
import pytest

import megatron_splitkv._planner as _planner

MODEL = _planner.QueryModel([9, 7], [9, 8], "causal")
GOOD = [[0, 0, 0, 9], [1, 1, 0, 8]]


@pytest.mark.parametrize(
    "run",
    [
        [2, 0, 0, 9], [-1, 0, 0, 9], [0, 2, 0, 1], [0, -1, 0, 1], [0, 0, -1, 3], [0, 0, 5, 3],
        [0, 0, 0, 10], [1 << 40, 0, 0, 1], [0, 1 << 40, 0, 1], [0, 0, -(1 << 62), 1 << 62],
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [_planner.rank_costs, _planner.needed_rows])
def test_runs_outside_the_pack_are_refused(function, run):
    with pytest.raises(ValueError, match="is not inside a document of this pack and 2 ranks"):
        function(MODEL, np.asarray([GOOD[0], run]), 2)


@pytest.mark.parametrize("cp_size", [0, -1, (1 << 12) + 1, 1 << 62])
@pytest.mark.parametrize("function", [_planner.rank_costs, _planner.needed_rows])
def test_groups_that_are_none_are_refused(function, cp_size):
    with pytest.raises(ValueError, match=f"cp_size={cp_size} must be at least 1 and at most 4096"):
        function(MODEL, np.asarray(GOOD), cp_size)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 5), (1, 2, 4)])
def test_arrays_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"runs must be \[n, 4\]"):
        _planner.rank_costs(MODEL, np.zeros(shape, dtype=np.int64), 2)


@pytest.mark.parametrize("indices", [(2, 0, 1), (-1, 0, 1), (0, 5, 3), (0, 0, 10), (0, -1, 3)])
def test_pairs_of_no_range_are_refused(indices):
    with pytest.raises(ValueError, match="is not inside a document"):
        MODEL.pairs_in(*indices)


def test_rows_before_the_stream_are_refused():
    good = np.asarray([[0, 5]])
    assert _planner.row_counts([good], [good]).tolist() == [[5]]
    with pytest.raises(ValueError, match=r"needed: \[-1, 5\) begins before the stream"):
        _planner.row_counts([good], [np.asarray([[-1, 5]])])
    with pytest.raises(ValueError, match=r"owned must be \[n, 2\]"):
        _planner.row_counts([np.zeros((1, 3), dtype=np.int64)], [good])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([9], [9], "spiral"), "query spec 'spiral' is unknown"),
        (([9], [9], "window", 0), "size=0 of a query spec must be at least 1"),
        (([9], [9], "suffix", -5), "size=-5 of a query spec must be at least 1"),
        (([9], [9], "anchors", 1, [0, 2], [1]), "anchor_ptr must ascend from 0 to the number"),
        (([9, 9], [9, 9], "anchors", 1, [0, 5, 1], [1]), "anchor_ptr must ascend from 0"),
        (([9], [9], "anchors", 1, [], []), "anchors are given for -1 documents"),
        (([9], [9], "anchors", 1, [-1, 1], [1]), "anchor_ptr must ascend from 0"),
    ],
)
def test_models_of_nonsense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _planner.QueryModel(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0, 64, 0), "cp_size=0"),
        ((2, 0, 0), "block_size=0 must be at least 1"),
        ((2, 1 << 40, 0), "must be at least 1 token and fit 31 bits"),
        ((2, 64, -1), "tolerance=-1 must lie in"),
        ((2, 64, _planner.TOLERANCE_UNITS + 1), "must lie in"),
        ((2, 64, 0, 3), "ranks_per_node=3 must divide cp_size=2"),
        ((2, 64, 0, 2, -1), "row_cost=-1"),
        ((2, 64, 0, 2, 0, 1 << 62), "beyond 2"),
        ((2, 64, 0, 2, 0, 0, [1]), "speeds are given for 1 ranks"),
        ((2, 64, 0, 2, 0, 0, [1, 0]), "speed 0 of a rank must be at least 1"),
    ],
)
def test_options_of_nonsense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _planner.assign_blocks(MODEL, *options)


def test_numbers_that_are_none_are_refused():
    with pytest.raises(TypeError):
        _planner.assign_blocks(MODEL, 2.5, 64, 0)
    with pytest.raises(TypeError):
        _planner.QueryModel([9.5], [10], "causal")
