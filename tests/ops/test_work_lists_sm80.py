"""The two work lists of the sm_80 backward: pure host code, tested without a GPU."""

import pytest
import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from tests.ops.cases import INTERVALS

NUM_SMS = 108
# By head dims: rows and keys of a step of dk and dv, rows and keys of a step of dq.
TILES = {
    (64, 64): ((64, 128), (128, 64)),
    (128, 128): ((32, 128), (128, 32)),
    (192, 128): ((32, 64), (64, 32)),
    (256, 256): ((16, 64), (64, 16)),
}
NAMES = (
    "num_rows num_keys num_heads_q num_heads_kv head_dim_qk head_dim_v family dq_heads_per_tile "
    "num_dq_items is_dq_head_major num_dq_merge_rows num_dq_part_rows heads_per_tile num_items "
    "num_row_tiles num_segments num_unseen_kv_tiles prefetches_dq num_splits "
    "is_head_major is_deterministic"
)


def _build(
    begin: Tensor, end: Tensor, num_keys: int, heads: tuple[int, int], dims: tuple[int, int]
) -> tuple[dict[str, int], list[list[list[int]]]]:
    """Sizes, and items, row tiles, segments, items and merge rows of dq, KV tiles that are unseen
    and those that are split.
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
        is_deterministic=False,
        family="sm80",
    )
    shape = dict(zip(NAMES.split(), work.shape, strict=True))
    ints = torch.full((work.num_ints,), -7, dtype=torch.int32)
    work.write(ints.data_ptr())
    counts = (
        (shape["num_items"], 8),
        (shape["num_row_tiles"], 4),
        (shape["num_segments"], 4),
        (shape["num_dq_items"], 8),
        (shape["num_dq_merge_rows"], 4),
        (shape["num_unseen_kv_tiles"], 1),
        (shape["num_splits"], 1),
    )
    lists = [
        part.view(count, width).tolist()
        for (count, width), part in zip(
            counts, ints.split([count * width for count, width in counts]), strict=True
        )
    ]
    return shape, lists


def _visible(begin: Tensor, end: Tensor, num_columns: int) -> Tensor:
    columns = torch.arange(num_columns)
    return (begin[:, None] <= columns) & (columns < end[:, None])


@pytest.mark.parametrize("dims", TILES)
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 1), (32, 8)])
@pytest.mark.parametrize("keys", [0, 1, 129, 1000])
@pytest.mark.parametrize("rows", [0, 1, 17, 129, 700])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_pairs_are_covered_once_in_each_list(
    intervals: str, rows: int, keys: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    begin, end = INTERVALS[intervals](rows, keys, torch.Generator().manual_seed(rows))
    shape, lists = _build(begin, end, keys, heads, dims)
    items, row_tiles, segments, dq_items, dq_rows, unseen, split = lists
    (step_rows, tile), (dq_tile_rows, dq_tile) = TILES[dims]
    visible = _visible(begin, end, keys + 16 * tile)

    covered = torch.zeros(visible.shape, dtype=torch.int32)
    next_part: dict[int, int] = {}
    for kv_tile, first_segment, num_segments, num_steps, part, num_parts, _, _ in items:
        steps = 0
        assert next_part.get(kv_tile, 0) == part < num_parts, "parts start in the order of turns"
        next_part[kv_tile] = part + 1
        for first, count, is_masked, _ in segments[first_segment : first_segment + num_segments]:
            steps += count
            for row, num_rows, _, _ in row_tiles[first : first + count]:
                assert 1 <= num_rows <= step_rows // shape["heads_per_tile"]
                pairs = slice(row, row + num_rows), slice(kv_tile * tile, (kv_tile + 1) * tile)
                covered[pairs] += 1
                sees = begin[pairs[0]] < end[pairs[0]]
                assert is_masked or visible[pairs][sees].all()
        assert steps == num_steps
    assert (covered[visible] == 1).all()
    assert sorted([*next_part, *(index for (index,) in unseen)]) == list(range(-(-keys // tile)))
    kv_tiles = {item[6]: item[0] for item in items if item[5] > 1}
    assert [index for (index,) in split] == [kv_tiles[i] for i in range(len(kv_tiles))]

    covered.zero_()
    writes = torch.zeros(rows, dtype=torch.int32)
    for row, num_rows, key, tiles, full_begin, full_end, part_row, _ in dq_items:
        assert 1 <= num_rows <= dq_tile_rows // shape["dq_heads_per_tile"]
        mine = slice(row, row + num_rows)
        covered[mine, key : key + tiles * dq_tile] += 1
        full = slice(key + full_begin * dq_tile, key + full_end * dq_tile)
        assert visible[mine, full][begin[mine] < end[mine]].all()
        writes[mine] += part_row < 0
    assert (covered[visible] == 1).all()
    for row, *_ in dq_rows:
        writes[row] += 1
    assert (writes == 1).all()


def test_keys_of_short_queries_are_split() -> None:
    begin = torch.zeros(16, dtype=torch.int32)
    shape, lists = _build(begin, begin + 100000, 100000, (32, 8), (128, 128))
    assert shape["dq_heads_per_tile"] == 4
    assert len(lists[3]) * 8 >= NUM_SMS
    assert len(lists[4]) == 16


def test_head_dims_without_a_kernel_are_refused() -> None:
    begin = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"head dims \(80, 80\), needs .* or \(256, 256\)"):
        _build(begin, begin + 5, 5, (1, 1), (80, 80))


def test_family_of_a_device() -> None:
    assert _kernels.cuda_family(8, 0) == "sm80"
    assert _kernels.cuda_family(8, 9) == "sm80"
    assert _kernels.cuda_family(9, 0) == "sm90"
    assert _kernels.cuda_family(12, 0) == "sm80"
    with pytest.raises(ValueError, match=r"compute capability 7\.5 needs to be 8\.0 or more"):
        _kernels.cuda_family(7, 5)


@pytest.mark.usefixtures("restored_family")
def test_forced_family() -> None:
    _kernels.force_cuda_family("sm80")
    assert _kernels.cuda_family(9, 0) == "sm80"
    _kernels.force_cuda_family("auto")
    assert _kernels.cuda_family(9, 0) == "sm90"
    with pytest.raises(ValueError, match=r"'sm70' cannot be forced, needs one of: auto sm80"):
        _kernels.force_cuda_family("sm70")
