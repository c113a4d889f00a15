from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Int64Array = npt.NDArray[np.int64]

TOLERANCE_UNITS: int
MAX_RANKS: int

class QueryModel:
    def __init__(
        self,
        doc_lens: Sequence[int],
        padded_lens: Sequence[int] | None,
        kind: str,
        size: int = 0,
        anchor_ptr: Sequence[int] = ...,
        anchor_positions: Sequence[int] = ...,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    def row_intervals(self) -> _Int64Array: ...
    def pairs_in(self, doc: int, begin: int, end: int) -> int: ...

def assign_blocks(
    model: QueryModel,
    cp_size: int,
    block_size: int,
    tolerance: int,
    ranks_per_node: int = 0,
    row_cost: int = 0,
    run_cost: int = 0,
    speed: Sequence[int] = ...,
) -> tuple[_Int64Array, list[int], list[int]]: ...
def rank_costs(model: QueryModel, runs: _Int64Array, cp_size: int) -> list[int]: ...
def needed_rows(model: QueryModel, runs: _Int64Array, cp_size: int) -> list[_Int64Array]: ...
def row_counts(owned: Sequence[_Int64Array], needed: Sequence[_Int64Array]) -> _Int64Array: ...
def intersect(a: _Int64Array, b: _Int64Array) -> _Int64Array: ...
