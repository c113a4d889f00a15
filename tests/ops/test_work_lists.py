"""Work lists of the CUDA forward: pure host code, tested without a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import WorkLists
from tests.ops.cases import INTERVALS

KEY_TILES = {0: 128, 1: 176, 2: 64}  # of head dims (128, 128) on sm_90, by kind
ROW_TILES = {0: 128, 1: 128, 2: 64}
SM80_TILE = 128, 64  # rows, keys
FAMILIES = {"sm90": 0, "sm80": 1}
NUM_SMS = 132


def _build(
    begin: Tensor,
    end: Tensor,
    num_keys: int,
    heads: tuple[int, int] = (4, 2),
    family: str = "sm90",
) -> tuple[dict[str, int], Tensor, Tensor]:
    """Sizes, items `[n, 8]` and merge rows `[m, 4]`."""
    work = _kernels.ForwardWork(
        kv_begin=begin.data_ptr(),
        kv_end=end.data_ptr(),
        num_rows=len(begin),
        num_keys=num_keys,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        head_dim_qk=128,
        head_dim_v=128,
        num_sms=NUM_SMS,
        family=family,
    )
    names = (
        "num_rows num_keys num_heads_q num_heads_kv head_dim_qk head_dim_v family kind "
        "heads_per_tile num_items is_head_major num_merge_rows num_part_rows"
    )
    shape = dict(zip(names.split(), work.shape, strict=True))
    ints = torch.full((work.num_ints,), -7, dtype=torch.int32)
    work.write(ints.data_ptr())
    items = ints[: 8 * shape["num_items"]].view(-1, 8)
    return shape, items, ints[8 * shape["num_items"] :].view(-1, 4)


def _check(
    begin: Tensor,
    end: Tensor,
    num_keys: int,
    heads: tuple[int, int] = (4, 2),
    family: str = "sm90",
) -> None:
    """Every visible pair is covered once, whole tiles are whole, parts are merged once."""
    shape, items, merge_rows = _build(begin, end, num_keys, heads, family)
    assert shape["family"] == FAMILIES[family]
    rows, tile = ROW_TILES[shape["kind"]], KEY_TILES[shape["kind"]]
    if family == "sm80":
        rows, tile = SM80_TILE
    max_rows = rows // shape["heads_per_tile"]
    covered = torch.zeros(len(begin), num_keys + 4 * tile, dtype=torch.int32)
    writes = torch.zeros(len(begin), dtype=torch.int32)
    part_rows: dict[int, int] = {}
    costs = items[:, 3].tolist()
    assert costs == sorted(costs, reverse=True), "dearest first"
    for row, rows, key, tiles, full_begin, full_end, part, _ in items.tolist():
        assert 1 <= rows <= max_rows
        assert 0 <= full_begin <= full_end <= tiles
        mine = slice(row, row + rows)
        covered[mine, key : key + tiles * tile] += 1
        sees = begin[mine] < end[mine]
        if full_end > full_begin:
            assert (begin[mine][sees] <= key + full_begin * tile).all()
            assert (end[mine][sees] >= key + full_end * tile).all()
        if part < 0:
            writes[mine] += 1
        else:
            part_rows |= {part + i: row + i for i in range(rows)}
    columns = torch.arange(covered.shape[1])
    visible = (begin[:, None] <= columns) & (columns < end[:, None])
    assert (covered[visible] == 1).all()
    assert sorted(part_rows) == list(range(shape["num_part_rows"]))
    merged: list[int] = []
    for row, first, count, stride in merge_rows.tolist():
        assert count > 1
        writes[row] += 1
        parts = [first + i * stride for i in range(count)]
        assert all(part_rows[part] == row for part in parts)
        merged += parts
    assert sorted(merged) == sorted(part_rows)
    assert (writes == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1), (32, 8)])
@pytest.mark.parametrize("keys", [0, 1, 129, 1000, 9000])
@pytest.mark.parametrize("rows", [0, 1, 17, 128, 129, 700])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_pairs_are_covered_once(
    intervals: str, rows: int, keys: int, heads: tuple[int, int], family: str
) -> None:
    begin, end = INTERVALS[intervals](rows, keys, torch.Generator().manual_seed(rows))
    _check(begin, end, keys, heads, family)


@settings(max_examples=60, deadline=None)
@given(
    docs=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4000)), max_size=12),
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


@pytest.mark.parametrize("rows", [16, 128, 256])
def test_short_queries_fill_the_gpu_in_one_wave(rows: int) -> None:
    shape, items, _ = _build(*_full(rows, 131072), 131072, (32, 8))
    assert shape["heads_per_tile"] == 4
    assert 0.9 * NUM_SMS <= len(items) * 8 <= NUM_SMS


def test_long_queries_are_not_split() -> None:
    shape, _, merge_rows = _build(*_full(16384, 16384), 16384, (16, 16))
    assert shape["kind"] == 1, "long key tiles"
    assert len(merge_rows) == 0
    end = torch.arange(1, 16385, dtype=torch.int32)
    _, _, merge_rows = _build(torch.zeros_like(end), end, 16384, (16, 16))
    assert len(merge_rows) == 0


def test_short_intervals_get_short_key_tiles() -> None:
    """512 keys are 4 tiles of 128, but 3 of 176 with 16 keys to spare: 3 % walked in vain."""
    shape, items, _ = _build(*_full(2048, 512), 512, (32, 32))
    assert shape["kind"] == 0
    assert (items[:, 3] == 4).all()


def test_rows_of_documents_far_apart_do_not_share_a_tile() -> None:
    begin = torch.tensor([0] * 64 + [50000] * 64, dtype=torch.int32)
    _, items, _ = _build(begin, begin + 128, 60000, (132, 132))
    assert items[:, 3].tolist() == [1, 1]


def test_interval_beyond_the_keys_is_refused() -> None:
    begin, end = _full(5, 100)
    with pytest.raises(ValueError, match=r"row 0 sees keys \[0, 100\), needs a part of \[0, 99\)"):
        _build(begin, end, 99)


def test_intervals_must_be_on_the_host() -> None:
    begin, end = _full(5, 100)
    with pytest.raises(ValueError, match=r"kv_end is torch\.int64 \[5\] on cpu, needs int32"):
        WorkLists(begin, end.long())
    with pytest.raises(ValueError, match=r"kv_begin has 5 rows, kv_end has 4"):
        WorkLists(begin, end[:4])
