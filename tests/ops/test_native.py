"""What the ops refuse, and what they say."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.ops import merge_partials_, partial_attention, reference
from megatron_splitkv.ops.native import refusal
from tests.ops.cases import Case, Shape, make_case


def _case() -> Case:
    return make_case(Shape(rows=4, keys=6, heads_q=2, heads_kv=2), intervals="full")


BAD_FORWARD: list[tuple[str, Callable[[Case], dict[str, Any]], str]] = [
    ("q is flat", lambda c: {"q": c.q[0]}, r"q has shape \[2, 32\], needs \[any, any, any\]"),
    ("k dim", lambda c: {"k": c.k[..., :16]}, r"k has shape \[6, 2, 16\], needs \[any, any, 32\]"),
    ("v rows", lambda c: {"v": c.v[:5]}, r"v has shape \[5, 2, 32\], needs \[6, 2, any\]"),
    ("v heads", lambda c: {"v": c.v[:, :1]}, r"v has shape \[6, 1, 32\], needs \[6, 2, any\]"),
    (
        "heads",
        lambda c: {"q": torch.zeros(4, 3, 32)},
        r"q has 3 heads, needs a multiple of the 2 heads of k and v",
    ),
    (
        "fp64",
        lambda c: {"q": c.q.double()},
        r"q has dtype float64, needs float32 or bfloat16 or float16; convert it with q\.to",
    ),
    ("mixed", lambda c: {"v": c.v.half()}, r"v has dtype float16, needs float32"),
    (
        "int64",
        lambda c: {"kv_end": c.kv_end.long()},
        r"kv_end has dtype int64, needs int32; convert it with kv_end\.to",
    ),
    ("rows", lambda c: {"kv_begin": c.kv_begin[:3]}, r"kv_begin has shape \[3\], needs \[4\]"),
    (
        "gaps",
        lambda c: {"kv_begin": torch.zeros(8, dtype=torch.int32)[::2]},
        r"kv_begin is not contiguous; pass kv_begin\.contiguous\(\)",
    ),
    (
        "transposed",
        lambda c: {"k": torch.zeros(6, 32, 2).transpose(1, 2)},
        r"k has stride 2 in its last dimension, needs 1; pass k\.contiguous\(\)",
    ),
    ("device", lambda c: {"k": c.k.to("meta")}, r"k is on meta, needs cpu"),
    (
        "too wide",
        lambda c: {"q": torch.zeros(4, 2, 513), "k": torch.zeros(6, 2, 513)},
        r"q has head_dim 513, needs 1 to 512",
    ),
    ("no dim", lambda c: {"v": c.v[..., :0]}, r"v has head_dim 0, needs 1 to 512"),
    (
        "beyond the keys",
        lambda c: {"kv_end": torch.tensor([6, 6, 7, 6]).int()},
        r"row 2 sees keys \[0, 7\), needs a part of \[0, 6\)",
    ),
    (
        "before the keys",
        lambda c: {"kv_begin": torch.tensor([0, -1, 0, 0]).int()},
        r"row 1 sees keys \[-1, 6\), needs a part of \[0, 6\)",
    ),
    (
        "gradient",
        lambda c: {"k": c.k.clone().requires_grad_()},
        r"partial_attention got k with requires_grad=True.*call megatron_splitkv\.splitkv_attent",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_FORWARD]
)
def test_forward_refuses(change: Callable[[Case], dict[str, Any]], message: str) -> None:
    case = _case()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(case, **change(case)).forward()


def test_forward_refuses_an_output_dtype() -> None:
    with pytest.raises(ValueError, match=r"out_dtype=torch\.float64 must be float32, bfloat16"):
        _case().forward(torch.float64)


def test_empty_rows_may_have_any_interval() -> None:
    """begin >= end is an empty row wherever the numbers point."""
    case = dataclasses.replace(
        _case(),
        kv_begin=torch.tensor([9, 2**31 - 1, 0, 5]).int(),
        kv_end=torch.tensor([-9, -(2**31), 0, 5]).int(),
    )
    out, lse = case.forward()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lse", (4, 3), r"lse has shape \[4, 3\], needs \[4, 2\]"),
        ("delta", (5, 2), r"delta has shape \[5, 2\], needs \[4, 2\]"),
        ("dk", (6, 2, 31), r"dk has shape \[6, 2, 31\], needs \[6, 2, 32\]"),
        ("dv", (5, 2, 32), r"dv has shape \[5, 2, 32\], needs \[6, 2, 32\]"),
        ("dout", (4, 2, 16), r"dout has shape \[4, 2, 16\], needs \[4, 2, 32\]"),
    ],
)
def test_backward_refuses_shapes(name: str, shape: tuple[int, ...], message: str) -> None:
    case = _case()
    lse, dk, dv = torch.zeros(4, 2), torch.zeros(6, 2, 32), torch.zeros(6, 2, 32)
    tensors = {"lse": lse, "delta": lse, "dk": dk, "dv": dv} | {name: torch.zeros(shape)}
    if name == "dout":
        case = dataclasses.replace(case, dout=tensors.pop("dout"))
    with pytest.raises(ValueError, match=message):
        case.backward_into(**tensors)


def test_backward_refuses_16_bit_accumulators() -> None:
    case = _case()
    lse, dk, dv = torch.zeros(4, 2), torch.zeros(6, 2, 32), torch.zeros(6, 2, 32)
    message = r"dk has dtype torch\.float16, but accumulate=True sums over calls in float32; pass"
    with pytest.raises(ValueError, match=message):
        case.backward_into(lse, lse, dk.half(), dv.half())
    with pytest.raises(ValueError, match="dv has dtype float16, needs float32"):
        case.backward_into(lse, lse, dk, dv.half())


@pytest.mark.parametrize(
    ("dk_dtype", "dv_dtype", "message"),
    [
        (torch.float16, torch.float16, "dk has dtype float16, needs float32 or bfloat16"),
        (torch.bfloat16, torch.float32, "dv has dtype float32, needs bfloat16"),
        (torch.float32, torch.bfloat16, "dv has dtype bfloat16, needs float32"),
    ],
    ids=str,
)
def test_backward_refuses_dtypes_of_gradients(
    dk_dtype: torch.dtype, dv_dtype: torch.dtype, message: str
) -> None:
    case = make_case(Shape(rows=4, keys=6, heads_q=2, heads_kv=2), dtype=torch.bfloat16)
    lse, dk, dv = torch.zeros(4, 2), torch.zeros(6, 2, 32), torch.zeros(6, 2, 32)
    with pytest.raises(ValueError, match=message):
        case.backward_into(lse, lse, dk.to(dk_dtype), dv.to(dv_dtype), accumulate=False)


def test_merge_refuses_16_bit_running_result() -> None:
    ptr, slots = torch.zeros(5).int(), torch.zeros(0).int()
    out, lse = torch.zeros(4, 2, 8).bfloat16(), torch.zeros(4, 2)
    with pytest.raises(ValueError, match="out has dtype bfloat16, needs float32"):
        merge_partials_(out, lse, torch.zeros(0, 2, 8), torch.zeros(0, 2), ptr, slots)


def test_refusal_of_a_device_names_the_way_out() -> None:
    error = refusal("partial_attention", torch.zeros(1, device="meta"))
    assert isinstance(error, UnsupportedError)
    assert str(error) == (
        "partial_attention got tensors on meta, needs a device with kernels, CPU or CUDA; move the "
        "tensors there or use megatron_splitkv.ops.reference.partial_attention"
    )


@pytest.mark.parametrize(
    "op", ["partial_attention_", "partial_attention_backward_", "merge_partials_"]
)
def test_backend_without_a_registered_kernel_is_refused(op: str) -> None:
    """Sparse tensors stand for a device that has none: they too miss the CPU registration."""
    case = _case()
    q, intervals = case.q.to_sparse(), (case.kv_begin, case.kv_end)
    lse, scale = torch.zeros(4, 2), {"softmax_scale": 1.0}
    arguments = {
        "partial_attention_": ((q, q, q, *intervals, q, lse), scale),
        "partial_attention_backward_": ((q, q, q, q, lse, lse, *intervals, q, q, q), scale),
        "merge_partials_": ((q, lse, q, lse, *intervals), {}),
    }
    positional, named = arguments[op]
    with pytest.raises(UnsupportedError, match=f"{op} got tensors on") as refused:
        getattr(torch.ops.megatron_splitkv, op).default(*positional, **named)
    assert hasattr(reference, str(refused.value).rpartition("reference.")[2])


def test_meta_tensors_give_shapes() -> None:
    case = _case()
    tensors = [x.to("meta") for x in (case.q, case.k, case.v, case.kv_begin, case.kv_end)]
    out, lse = partial_attention(*tensors, softmax_scale=1.0, out_dtype=torch.bfloat16)
    assert (out.shape, out.dtype) == ((4, 2, 32), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 2), torch.float32)
