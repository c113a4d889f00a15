"""Where the rows of each collective lie in a buffer that is used round and round."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256  # of the start of a region


@dataclass(frozen=True, slots=True)
class _Region:
    begin: int
    number: int
    readers: tuple[int, ...]


class Regions:
    """Hands out regions of a buffer in a circle; pure bookkeeping.

    Every rank of a group that asks for the same sizes in the same order gets the same places.
    """

    def __init__(self, capacity: int) -> None:
        """Starts with a free buffer of `capacity` bytes."""
        self.capacity = capacity
        self._end = 0  # of the newest region
        self._used: deque[_Region] = deque()  # oldest first

    def take(self, size: int, number: int, readers: Sequence[int]) -> tuple[int, dict[int, int]]:
        """A place for the rows of a collective.

        Args:
            size: bytes, at most the capacity.
            number: of the collective, ascending.
            readers: ranks that will read from it here.
        Returns:
            Its first byte, and for each rank that read from what lay there before the number of
            the last collective that it must be done with.
        """
        assert size <= self.capacity, "the buffer was not grown"
        waits: dict[int, int] = {}

        def give_up_oldest() -> None:
            region = self._used.popleft()
            waits.update(dict.fromkeys(region.readers, region.number))

        begin = self._end
        if begin + size > self.capacity:
            while self._used and self._used[0].begin >= begin:  # what is left of the last round
                give_up_oldest()
            begin = 0
        end = begin + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while self._used and begin <= self._used[0].begin < end:
            give_up_oldest()
        if readers:
            self._used.append(_Region(begin, number, tuple(readers)))
        self._end = end
        return begin, waits
