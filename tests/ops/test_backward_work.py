"""Work lists of the CUDA backward: pure host code, tested without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.layout import build_layout
from megatron_splitkv.plan import make_plan
from tests.ops.cases import INTERVALS

# Rows of a row tile and keys of a KV tile, by head dims (qk, v).
TILES = {(64, 64): (128, 128), (128, 128): (64, 128), (192, 128): (64, 128), (256, 256): (64, 64)}
NUM_SMS = 132
NAMES = (
    "num_rows num_keys num_heads_q num_heads_kv head_dim_qk head_dim_v family dq_heads_per_tile "
    "num_dq_items is_dq_head_major num_dq_merge_rows num_dq_part_rows heads_per_tile num_items "
    "num_row_tiles num_segments num_unseen_kv_tiles prefetches_dq num_splits "
    "is_head_major is_deterministic"
)


def _build(
    begin: Tensor,
    end: Tensor,
    num_keys: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (128, 128),
    is_deterministic: bool = False,
) -> tuple[dict[str, int], Tensor, Tensor, Tensor, Tensor]:
    """Sizes, items `[n, 8]`, row tiles `[t, 4]`, segments `[s, 4]` and unseen KV tiles `[u]`.

    The list of the KV tiles that are split is checked against the items.
    """
    work = _kernels.BackwardWork(
        kv_begin=begin.data_ptr(),
        kv_end=end.data_ptr(),
        num_rows=len(begin),
        num_keys=num_keys,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        num_sms=NUM_SMS,
        is_deterministic=is_deterministic,
        family="sm90",
    )
    shape = dict(zip(NAMES.split(), work.shape, strict=True))
    ints = torch.full((work.num_ints,), -7, dtype=torch.int32)
    work.write(ints.data_ptr())
    counts = [8 * shape["num_items"], 4 * shape["num_row_tiles"], 4 * shape["num_segments"]]
    items, row_tiles, segments, unseen, split = ints.split(
        [*counts, shape["num_unseen_kv_tiles"], shape["num_splits"]]
    )
    items = items.view(-1, 8)
    kv_tiles = {int(item[6]): int(item[0]) for item in items if item[5] > 1}
    assert split.tolist() == [kv_tiles[index] for index in range(shape["num_splits"])]
    return shape, items, row_tiles.view(-1, 4), segments.view(-1, 4), unseen


def _check(
    begin: Tensor,
    end: Tensor,
    num_keys: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (128, 128),
    is_deterministic: bool = False,
) -> None:
    """Every visible pair is covered once, whole tiles are whole, turns are all taken in order."""
    shape, items, row_tiles, segments, unseen = _build(
        begin, end, num_keys, heads=heads, dims=dims, is_deterministic=is_deterministic
    )
    tile_rows, tile_keys = TILES[dims]
    max_rows = tile_rows // shape["heads_per_tile"]
    tile_of_row = torch.full((len(begin),), -1)
    for index, (row, rows, _, _) in enumerate(row_tiles.tolist()):
        assert 1 <= rows <= max_rows
        assert (tile_of_row[row : row + rows] == -1).all()
        tile_of_row[row : row + rows] = index
    assert (tile_of_row >= 0).all()

    visits: dict[int, list[int]] = {}  # KV tiles that visit a row tile, in the order of the list
    parts: dict[int, list[int]] = {}
    masked: dict[tuple[int, int], bool] = {}
    for kv_tile, first, count, steps, part, num_parts, _, _ in items.tolist():
        mine = segments[first : first + count]
        assert steps == int(mine[:, 1].sum()) > 0
        parts.setdefault(kv_tile, []).append(part)
        assert part < num_parts
        for start, tiles, is_masked, _ in mine.tolist():
            for tile in range(start, start + tiles):
                assert (tile, kv_tile) not in masked, "covered twice"
                masked[tile, kv_tile] = bool(is_masked)
                visits.setdefault(tile, []).append(kv_tile)
    assert sorted([*parts, *unseen.tolist()]) == list(range(-(-num_keys // tile_keys)))
    for order in parts.values():
        assert order == list(range(len(order))), "a later part comes before an earlier one"

    for row in range(len(begin)):
        low, high, tile = int(begin[row]), int(end[row]), int(tile_of_row[row])
        if low >= high:
            continue
        for kv_tile in range(low // tile_keys, (high - 1) // tile_keys + 1):
            is_cut = low > kv_tile * tile_keys or high < (kv_tile + 1) * tile_keys
            assert masked[tile, kv_tile] or not is_cut, "a cut tile without mask"
    for tile, kv_tiles in visits.items():
        turns = sorted(kv_tile - int(row_tiles[tile, 2]) for kv_tile in kv_tiles)
        assert turns == list(range(len(turns)))
        if is_deterministic:
            assert kv_tiles == sorted(kv_tiles), "handed out before one that it waits for"


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1), (32, 8)])
@pytest.mark.parametrize("keys", [0, 1, 129, 1000])
@pytest.mark.parametrize("rows", [0, 1, 17, 128, 300])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_pairs_are_covered_once(
    intervals: str, rows: int, keys: int, heads: tuple[int, int], is_deterministic: bool
) -> None:
    begin, end = INTERVALS[intervals](rows, keys, torch.Generator().manual_seed(rows))
    for dims in TILES:
        _check(begin, end, keys, heads, dims, is_deterministic)


@settings(max_examples=60, deadline=None)
@given(
    docs=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 900)), max_size=8),
    heads=st.sampled_from([(1, 1), (8, 1), (16, 4)]),
)
def test_documents_with_ragged_rows(docs: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    begins, ends, start = [torch.zeros(0)], [torch.zeros(0)], 0
    for rows, keys in docs:
        begins.append(torch.full((rows,), start))
        ends.append(start + torch.linspace(0, keys, rows).round())
        start += keys
    _check(torch.cat(begins).int(), torch.cat(ends).int(), start, heads)


def _full(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    end = torch.full((rows,), keys, dtype=torch.int32)
    return torch.zeros_like(end), end


def test_few_keys_split_their_rows() -> None:
    shape, items, *_ = _build(*_full(60000, 1024), 1024, heads=(2, 1))
    assert shape["num_splits"] == 8
    assert NUM_SMS // 2 <= len(items) <= NUM_SMS
    assert int(items[:, 3].max()) - int(items[:, 3].min()) <= 1


def test_long_documents_are_not_split() -> None:
    end = torch.arange(1, 16385, dtype=torch.int32)
    shape, items, _, segments, _ = _build(torch.zeros_like(end), end, 16384, heads=(16, 16))
    assert shape["num_splits"] == 0
    assert len(items) == 128
    assert items[:, 3].tolist() == list(range(256, 0, -2)), "dearest first"
    # Two row tiles on the diagonal, then whole ones.
    assert segments[segments[:, 2] == 1, 1].tolist() == [2] * 128


def test_uneven_items_take_a_quarter_of_a_share_at_most() -> None:
    """16 KV tiles with 313 row tiles each and 32 with 157; an SM's share is 608 of the 80256."""
    begin = torch.cat([torch.zeros(20000), torch.full((10000,), 2048.0)]).int()
    end = torch.cat([torch.full((20000,), 2048.0), torch.full((10000,), 6144.0)]).int()
    shape, items, *_ = _build(begin, end, 6144, heads=(32, 8))
    assert shape["num_splits"] == 48
    assert int(items[:, 3].max()) <= 608 // 4
    assert shape["prefetches_dq"], "each row tile meets 16 or 32 KV tiles"


def test_alike_items_stay_whole_where_they_fill_waves() -> None:
    """32 KV tiles of 8 heads are 1.94 waves of 132 items."""
    shape, *_ = _build(*_full(2048, 4096), 4096, heads=(32, 8))
    assert shape["num_splits"] == 0


def test_parts_of_alike_items_get_shorter() -> None:
    """124 KV tiles of 4 heads are 3.76 waves: the rest of the fourth is filled."""
    shape, items, *_ = _build(*_full(4096, 15872), 15872, heads=(32, 4))
    assert shape["num_splits"] == 124
    assert items[:, 3].tolist() == [32] * 124 + [16] * 124 + [8] * 248
    assert items[:124, 0].tolist() == list(range(124)), "those of a length in the order of the keys"


def test_unlike_items_are_cut_to_one_length() -> None:
    """The first 62 of 128 KV tiles have 64 steps, the others fewer and fewer; some with nearly as
    many would be the longest items if only the dearest were cut.
    """
    end = torch.linspace(7936, 16384, 4096).int()
    shape, items, *_ = _build(torch.zeros_like(end), end, 16384, heads=(32, 4))
    lengths = items[:, 3].tolist()
    assert shape["num_splits"] > 62
    assert max(lengths) == lengths[0] == 32, "half of 64"


def test_items_a_little_above_a_share_are_cut_alike() -> None:
    """The dearest of 28 KV tiles has 56 steps, 1.14 times what the 8 heads give each SM."""
    end = torch.arange(1, 3585, dtype=torch.int32)
    _, items, *_ = _build(torch.zeros_like(end), end, 3584, heads=(32, 8))
    assert int(items[:, 3].max()) == 12, "a fifth of 56"


def test_items_of_like_cost_stay_in_the_order_of_the_keys() -> None:
    docs = torch.tensor([3000, 9000, 5000, 9000])
    ends = docs.cumsum(0)
    begin = torch.repeat_interleave(ends - docs, docs).int()
    end = torch.arange(1, 26001, dtype=torch.int32)
    _, items, *_ = _build(begin, end, 26000, heads=(8, 8))
    order = [(-steps.bit_length(), kv_tile) for kv_tile, _, _, steps, *_ in items.tolist()]
    assert order == sorted(order)


def test_rows_beyond_l2_come_in_bands() -> None:
    """A row tile takes 512 KiB of each of 24 KV heads: a band has 64, 4 MiB of a query head."""
    shape, items, _, segments, _ = _build(*_full(8192, 17024), 17024, heads=(192, 24))
    assert shape["num_splits"] == 133
    assert shape["is_head_major"]
    assert items[:, 0].tolist() == [*range(133)] * 4, "band by band, the last ones short"
    assert items[:, 3].tolist() == [64] * 133 + [32] * 133 + [16] * 266
    starts = segments[items[:34, 1].long(), 0].tolist()
    assert starts == [*range(0, 64, 2), 0, 2], "the first brings rows, the others find them"


def test_gathered_keys_of_several_documents_come_without_bands() -> None:
    """Rank 1 has the middle of two documents. The first keys of each are seen by all of its rows
    there, the last ones by few: unlike items, that no head may start late.
    """
    plan = make_plan([20000, 12000, 768], 2, route="keys")
    keys = build_layout(plan, 1).keys
    assert keys is not None
    (shared,) = keys.shared
    begin, end = shared.intervals.begin, shared.intervals.end
    num_keys = shared.keys.stop - shared.keys.start
    assert (len(begin), num_keys) == (16384, 23976)
    shape, *_ = _build(begin, end, num_keys, heads=(16, 4))
    assert not shape["is_head_major"]
    end = torch.arange(1, 32769, dtype=torch.int32)
    shape, *_ = _build(torch.zeros_like(end), end, 32768, heads=(16, 4))
    assert shape["is_head_major"]


def test_rows_that_few_keys_visit_come_in_short_bands() -> None:
    shape, items, *_ = _build(*_full(16384, 2048), 2048, heads=(64, 16))
    assert shape["prefetches_dq"]
    assert not shape["is_head_major"], "heads side by side share the adds that miss L2"
    assert items[:, 3].unique().tolist() == [8, 16, 32]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_bands_cover_pairs_once(is_deterministic: bool) -> None:
    docs = torch.tensor([700, 50, 1600, 650])
    ends = docs.cumsum(0)
    begin = torch.repeat_interleave(ends - docs, docs).int()
    end = torch.arange(1, 3001, dtype=torch.int32)
    _check(begin, end, 3000, (256, 2), is_deterministic=is_deterministic)
    _check(*_full(840, 17000), 17000, (64, 1), is_deterministic=is_deterministic)


def test_short_queries_share_a_tile() -> None:
    shape, items, row_tiles, *_ = _build(*_full(16, 131072), 131072, heads=(32, 8))
    assert shape["heads_per_tile"] == 4
    assert len(row_tiles) == 1
    assert len(items) == 1024
    assert not shape["is_head_major"], "the heads of a KV tile lie side by side"


@pytest.mark.parametrize(
    ("dims", "heads", "rows", "is_head_major"),
    [
        ((256, 256), 8, 16384, True),
        ((256, 256), 32, 4096, False),  # too few items in a head
        ((128, 128), 16, 16384, False),
    ],
)
def test_short_tiles_share_the_rows_of_a_head(
    dims: tuple[int, int], heads: int, rows: int, is_head_major: bool
) -> None:
    end = torch.arange(1, rows + 1, dtype=torch.int32)
    shape, *_ = _build(torch.zeros_like(end), end, rows, heads=(heads, heads), dims=dims)
    assert shape["is_head_major"] == is_head_major


def test_interval_beyond_the_keys_is_refused() -> None:
    begin, end = _full(5, 100)
    with pytest.raises(ValueError, match=r"row 0 sees keys \[0, 100\), needs a part of \[0, 99\)"):
        _build(begin, end, 99)


def test_head_dims_without_a_kernel_are_refused() -> None:
    begin, end = _full(5, 100)
    with pytest.raises(ValueError, match=r"backward of head dims \(80, 80\), needs \(64, 64\)"):
        _build(begin, end, 100, dims=(80, 80))
