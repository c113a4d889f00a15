"""Rows packed side by side: against indexing, for any dtype, width and stride; and refusals."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import pack_rows_, reference

# The device decides which kernel packs; what is expected is the same.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float16, torch.int32]


def sources_of(widths: Sequence[int], device: str, num_rows: int = 23) -> list[Tensor]:
    """Random bits of other dtypes, so many elements of each row."""
    generator = torch.Generator().manual_seed(sum(widths))
    sources = [
        torch.randint(0, 100, (num_rows, width), generator=generator).to(dtype)
        for width, dtype in zip(widths, DTYPES, strict=False)
    ]
    return [source.to(device) for source in sources]


def expected_of(sources: Sequence[Tensor], rows: Tensor | None) -> tuple[Tensor, list[int]]:
    """Packed rows, each field padded to 16 bytes by zeros, and where the fields begin."""
    begins, parts, end = list[int](), list[Tensor](), 0
    for source in sources:
        part = (source if rows is None else source[rows]).contiguous()
        part = part.flatten(1).view(torch.uint8)
        padding = -part.shape[1] % 16
        parts.append(torch.nn.functional.pad(part, (0, padding)))
        begins.append(end)
        end += part.shape[1] + padding
    return torch.cat(parts, 1), begins


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [[4], [1, 1, 1, 1], [128, 3, 5, 1, 7], [4096, 64, 640]], ids=str)
@pytest.mark.parametrize("rows", [None, [], [5], [22, 0, 3, 3, 7]], ids=str)
def test_chosen_rows_lie_side_by_side(
    rows: list[int] | None, widths: list[int], device: str
) -> None:
    sources = sources_of(widths, device)
    index = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device)
    expected, begins = expected_of(sources, index)
    packed = torch.full_like(expected, 255)
    pack_rows_(packed, sources, begins, index)
    assert torch.equal(packed, expected)
    reference.pack_rows_(packed.fill_(255), sources, begins, index)
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_rows_may_be_views_of_wider_ones(offset: int, device: str) -> None:
    """Any alignment of a row: the bytes decide, not how wide they are copied."""
    wide = torch.randint(0, 256, (9, 80), dtype=torch.uint8, device=device)
    source = wide[:, offset : offset + 48]
    index = torch.tensor([8, 1], device=device)
    packed = torch.empty(2, 64, dtype=torch.uint8, device=device)
    pack_rows_(packed, [source], [16], index)
    assert torch.equal(packed[:, 16:], source[index])
    assert not packed[:, :16].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": torch.empty(2, 32)}, "packed has dtype float32, needs uint8"),
        ({"packed": torch.empty(2, 64, dtype=torch.uint8)[:, ::2]}, "packed is not contiguous"),
        ({"rows": torch.tensor([0, 1, 2])}, r"rows has shape \[3\], needs \[2\]"),
        ({"rows": torch.tensor([0, 1]).int()}, "rows has dtype int32, needs int64"),
        ({"rows": torch.tensor([0, 4])}, r"rows\[1\]=4, needs 0 to 3"),
        ({"rows": torch.tensor([-1, 0])}, r"rows\[0\]=-1, needs 0 to 3"),
        ({"rows": None}, "packed has 2 rows, needs the 4 of its sources, or rows to choose"),
        ({"begins": [0]}, "begins has 1 numbers for 2 sources"),
        ({"begins": [0, 15]}, r"field 1 lies at bytes \[15, 31\), needs to begin at 16 or later"),
        ({"begins": [0, 17]}, "the last field ends at byte 33 of 32"),
        (
            {"sources": [torch.zeros(4, 4), torch.zeros(3, 4)]},
            "source 1 has 3 rows on cpu, needs 4",
        ),
        (
            {"sources": [torch.zeros(4, 4), torch.zeros(4, 4, device="meta")]},
            "source 1 has 4 rows on meta, needs 4 on cpu",
        ),
        (
            {"sources": [torch.zeros(4, 4), torch.zeros(4, 4).T]},
            r"source 1 has strides \(1, 4\), needs contiguous rows; pass \.contiguous\(\)",
        ),
        (
            {"sources": [torch.zeros(4, 4), torch.zeros(4, 4, requires_grad=True)]},
            "pack_rows_ got source 1 with requires_grad=True",
        ),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "packed": torch.empty(2, 32, dtype=torch.uint8),
        "sources": [torch.zeros(4, 4), torch.zeros(4, 4)],
        "begins": [0, 16],
        "rows": torch.tensor([3, 0]),
    }
    with pytest.raises(ValueError, match=message):
        pack_rows_(**(arguments | changes))  # pyright: ignore[reportArgumentType]


def test_too_many_fields() -> None:
    sources = [torch.zeros(1, 4)] * 9
    with pytest.raises(ValueError, match="a row has 9 fields, needs at most 8"):
        pack_rows_(torch.empty(1, 144, dtype=torch.uint8), sources, range(0, 144, 16))


@pytest.mark.skipif(not _kernels.has_cuda_kernels(), reason="needs a build with CUDA kernels")
def test_rows_on_cuda_must_be_aligned() -> None:
    launch = _kernels.Launch(
        device=_kernels.Device.cuda, stream=0, workspace=0, num_threads=1, workspace_bytes=0,
        device_index=0,
    )  # fmt: skip
    for packed, row_bytes in ((0, 24), (8, 32)):
        with pytest.raises(ValueError, match="needs multiples of 16, also of its address"):
            _kernels.pack(
                packed=packed, num_rows=1, row_bytes=row_bytes, index=0, num_source_rows=1,
                sources=[], row_strides=[], begins=[], ends=[], launch=launch,
            )  # fmt: skip


def test_registration() -> None:
    torch.library.opcheck(
        torch.ops.megatron_splitkv.pack_rows_.default,
        (
            torch.zeros(2, 32, dtype=torch.uint8),
            [torch.ones(3, 4), torch.ones(3, 2).bfloat16()],
            [0, 16],
            torch.tensor([2, 0]),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
