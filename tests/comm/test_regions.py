"""Places in a buffer that is used round and round."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_splitkv.comm.regions import ALIGNMENT_BYTES, Regions

CAPACITY = 10 * ALIGNMENT_BYTES
SIZES = st.integers(0, CAPACITY)
READERS = st.sets(st.integers(0, 2))


@given(st.lists(st.tuples(SIZES, READERS), max_size=60))
def test_nothing_is_overwritten_that_somebody_may_still_read(calls):
    """Readers are as slow as they may be: done only with what they were waited for."""
    regions = Regions(CAPACITY)
    shown: list[tuple[int, int, int, set[int]]] = []  # number, begin, end, who still reads it
    for number, (size, readers) in enumerate(calls):
        begin, waits = regions.take(size, number, sorted(readers))
        for earlier, _, _, left in shown:
            left -= {reader for reader, until in waits.items() if earlier <= until}
        end = begin + size
        assert begin >= 0 and end <= CAPACITY
        assert begin % ALIGNMENT_BYTES == 0
        for _, other_begin, other_end, left in shown:
            assert not left or not (begin < other_end and other_begin < end)
        shown.append((number, begin, end, set(readers) if size else set()))


@given(st.lists(st.tuples(SIZES, READERS, READERS), max_size=60))
def test_places_follow_from_sizes_alone(calls):
    mine, theirs = Regions(CAPACITY), Regions(CAPACITY)
    for number, (size, readers, others) in enumerate(calls):
        assert (
            mine.take(size, number, sorted(readers))[0]
            == theirs.take(size, number, sorted(others))[0]
        )


def test_a_reader_is_waited_for_by_the_last_that_it_reads():
    regions = Regions(4 * ALIGNMENT_BYTES)
    for number, readers in enumerate([[1], [1, 2], [2], []]):
        assert regions.take(ALIGNMENT_BYTES, number, readers)[1] == {}
    assert regions.take(2 * ALIGNMENT_BYTES, 4, [1])[1] == {1: 1, 2: 1}
    assert regions.take(2 * ALIGNMENT_BYTES, 5, [1])[1] == {2: 2}


def test_what_is_left_of_the_last_round_is_given_up_with_it():
    regions = Regions(4 * ALIGNMENT_BYTES)
    regions.take(ALIGNMENT_BYTES, 0, [1])
    regions.take(2 * ALIGNMENT_BYTES, 1, [2])
    begin, waits = regions.take(2 * ALIGNMENT_BYTES, 2, [1])  # one is left, two are asked for
    assert (begin, waits) == (0, {1: 0, 2: 1})
