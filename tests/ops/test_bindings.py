"""The native functions: one binding for both devices, which refuses by name before anything runs.

Calls that name CUDA get tensors of the CPU: a machine without a GPU reads none of them.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.native import launch_on, rows_at

STUB = Path(__file__).resolve().parents[2] / "megatron_splitkv/_kernels.pyi"
NUM_ROWS, NUM_KEYS, NUM_PARTS, HEADS_Q, HEADS_KV, DIM_QK, DIM_V = 5, 7, 9, 4, 2, 192, 128
DEVICES = ["cpu", *(["cuda"] if _kernels.has_cuda_kernels() else [])]

Q, OUT, LSE = (NUM_ROWS, HEADS_Q, DIM_QK), (NUM_ROWS, HEADS_Q, DIM_V), (NUM_ROWS, HEADS_Q)
K, V = (NUM_KEYS, HEADS_KV, DIM_QK), (NUM_KEYS, HEADS_KV, DIM_V)
PART_OUT, PART_LSE = (NUM_PARTS, HEADS_Q, DIM_V), (NUM_PARTS, HEADS_Q)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {"q": Q, "k": K, "v": V, "out": OUT, "lse": LSE},
    "backward": {
        "q": Q, "k": K, "v": V, "dout": OUT, "lse": LSE, "delta": LSE, "dq": Q, "dk": K, "dv": V,
    },
    "merge": {
        "out": OUT, "lse": LSE, "part_out": PART_OUT, "part_lse": PART_LSE, "part_scale": PART_LSE,
    },
    "add": {"total": OUT, "parts": PART_OUT, "part_scale": PART_LSE},
    "encode": {"values": OUT, "encoded": OUT, "scale": LSE, "lse": LSE, "sent_lse": LSE},
    "cuda_row_dot": {"a": OUT, "b": OUT, "sums": LSE},
}  # fmt: skip
IN_FP16 = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "dout"), "encode": ("encoded",)}
IN_FP32 = {
    "forward": ("lse",),
    "backward": ("lse", "delta", "dq", "dk", "dv"),
    "merge": ("out", "lse", "part_lse", "part_scale"),
    "add": ("total", "part_scale"),
    "encode": ("values", "scale", "lse", "sent_lse"),
    "cuda_row_dot": ("sums",),
}


def _cases(names: Mapping[str, Iterable[str]]) -> list[tuple[str, str, str]]:
    """(op, operand, device) for the operands named and the devices that the op runs on."""
    return [
        (op, name, device)
        for op, operands in names.items()
        for name in operands
        for device in DEVICES
        if device == "cuda" or op != "cuda_row_dot"
    ]


def _tensors(op: str) -> dict[str, Tensor]:
    halves = IN_FP16.get(op, ())
    return {
        name: torch.zeros(shape, dtype=torch.float16 if name in halves else torch.float32)
        for name, shape in SHAPES[op].items()
    }


def _others(op: str) -> dict[str, Any]:
    """The arguments that are no tensors."""
    if op in ("merge", "add"):
        return {"part_ptr": 0, "part_slots": 0, "num_slots": 0, "accumulates": True}
    if op == "encode":
        return {"index": 0}
    if op not in ("forward", "backward"):
        return {}
    begin, end = torch.zeros(NUM_ROWS).int(), torch.full((NUM_ROWS,), NUM_KEYS).int()
    kind, more = _kernels.ForwardWork, dict[str, bool]()
    if op == "backward":
        kind, more = _kernels.BackwardWork, {"is_deterministic": False}
    work = kind(
        kv_begin=begin.data_ptr(), kv_end=end.data_ptr(), num_rows=NUM_ROWS, num_keys=NUM_KEYS,
        num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV, head_dim_qk=DIM_QK, head_dim_v=DIM_V,
        num_sms=132, family="sm90", **more,
    )  # fmt: skip
    others = {"kv_begin": 0, "kv_end": 0, "softmax_scale": 0.5, "work": 1, "work_shape": work.shape}
    return others | ({"accumulates": True} if op == "backward" else {})


def _call(op: str, device: str, *, workspace_bytes: int = 1 << 40, **changes: Any) -> None:
    """Calls a native function with arguments that fit each other but for the changes."""
    arguments = _tensors(op) | _others(op) | changes
    launch = _kernels.Launch(
        device=getattr(_kernels.Device, device), stream=0, workspace=0, num_threads=1,
        workspace_bytes=workspace_bytes, device_index=0,
    )  # fmt: skip
    getattr(_kernels, op)(**arguments, launch=launch)


# The sizes of the first operand are those that the others must have.
@pytest.mark.parametrize(
    ("op", "name", "device"), _cases({op: list(shapes)[1:] for op, shapes in SHAPES.items()})
)
def test_another_size_is_refused_by_name(op: str, name: str, device: str) -> None:
    tensor = _tensors(op)[name]
    wrong = torch.cat([tensor, tensor], dim=2 if name == "k" else 1)
    with pytest.raises(ValueError, match=rf"^{name} has shape \["):
        _call(op, device, **{name: wrong})


@pytest.mark.parametrize(("op", "name", "device"), _cases(IN_FP32))
def test_half_precision_is_refused_by_name(op: str, name: str, device: str) -> None:
    wrong = _tensors(op)[name].half()
    with pytest.raises(ValueError, match=f"^{name} must be float32"):
        _call(op, device, **{name: wrong})


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("forward", {"softmax_scale": 0.0}, "softmax_scale=0 must be positive on CUDA"),
        ("forward", {"work": 0}, "work is missing on CUDA; take it from WorkLists"),
        ("forward", {"work_shape": [1]}, "work_shape has 1 numbers, needs 13; take it from"),
        ("forward", {"work_shape": [1] * 13}, "the work list was made for 1 rows, 1 keys, 1/1"),
        ("forward", {"workspace_bytes": 3}, "workspace holds 3 bytes, needs"),
        ("backward", {"softmax_scale": 0.0}, "softmax_scale=0 must be positive on CUDA"),
        ("backward", {"work": 0}, "work is missing on CUDA; take it from WorkLists"),
        ("backward", {"work_shape": []}, "work_shape has 0 numbers, needs 21; take it from"),
        ("backward", {"work_shape": [1] * 21}, "the work list was made for 1 rows, 1 keys, 1/1"),
        ("backward", {"workspace_bytes": 3}, "workspace holds 3 bytes, needs"),
        ("backward", {"dout": torch.zeros(OUT)}, "dout and q differ in dtype"),
        ("backward", {"dk": torch.zeros(K).half(), "accumulates": False}, "dk and dv differ in"),
        ("backward", {"dv": torch.zeros(V).bfloat16(), "accumulates": False}, "dv must be float32"),
        ("backward", {"dq": torch.zeros(NUM_ROWS, HEADS_Q, 200)[..., :DIM_QK]}, "dq must be cont"),
    ],
)
def test_what_cuda_alone_refuses(op: str, changes: dict[str, Any], message: str) -> None:
    if not _kernels.has_cuda_kernels():
        pytest.skip("needs a build with CUDA kernels")
    with pytest.raises(ValueError, match=message):
        _call(op, "cuda", **changes)


@pytest.mark.parametrize("op", SHAPES)
def test_arguments_that_fit_get_as_far_as_the_gpu(op: str) -> None:
    """Without it the tests above might see a refusal of something else."""
    if torch.cuda.is_available() or not _kernels.has_cuda_kernels():
        pytest.skip("needs a build with CUDA kernels on a machine without a GPU")
    with pytest.raises(ValueError, match="cudaGetDevice"):
        _call(op, "cuda")


def test_the_cpu_does_not_overwrite_gradients() -> None:
    with pytest.raises(ValueError, match="accumulates=false, but the CPU adds to dk and dv"):
        _call("backward", "cpu", accumulates=False)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.zeros(OUT).int(), ValueError, "has dtype torch.int32, needs float32, bfloat16 or"),
        (torch.zeros(4), ValueError, "a tensor has 1 sizes and 1 strides, needs 2 or 3 of both"),
        (torch.zeros(1, 1, 1, 1), ValueError, "a tensor has 4 sizes and 4 strides"),
        (7, AttributeError, "'int' object has no attribute"),
    ],
)
def test_what_is_no_rows_is_refused(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _call("encode", "cpu", values=wrong)


def test_rows_at_an_address_stand_for_a_tensor() -> None:
    """In any of its two forms, and with strides of its own."""
    lse, beside = torch.randn(NUM_ROWS, HEADS_Q), torch.zeros(NUM_ROWS, 3 * HEADS_Q)
    address = beside.data_ptr() + 4 * HEADS_Q
    rows = rows_at(address, torch.float32, (NUM_ROWS, HEADS_Q), (3 * HEADS_Q, 1))
    _call("encode", "cpu", lse=lse, sent_lse=rows)
    assert torch.equal(beside[:, HEADS_Q : 2 * HEADS_Q], lse)
    assert not beside[:, :HEADS_Q].any() and not beside[:, 2 * HEADS_Q :].any()


@pytest.mark.parametrize(("op", "name"), [("merge", "out"), ("add", "parts"), ("forward", "q")])
def test_only_a_scale_may_be_none(op: str, name: str) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _call(op, "cpu", **{name: None})


def test_a_launch_on_cuda_holds_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    device = torch.device("cuda", 3)

    def current_stream(index: int) -> int:
        assert index == 3
        return 77

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current_stream, raising=False)
    monkeypatch.setattr(_kernels, "Launch", lambda **fields: seen.update(fields))
    workspace = torch.empty(5, dtype=torch.uint8)
    launch_on(device, workspace)
    want = {"device": _kernels.Device.cuda, "stream": 77, "device_index": 3, "workspace_bytes": 5}
    assert seen | want == seen
    assert seen["workspace"] == workspace.data_ptr()
    launch_on(torch.device("cpu"))
    want = {"device": _kernels.Device.cpu, "stream": 0, "device_index": 0, "workspace": 0}
    assert seen | want == seen


def _declared() -> dict[str, list[str]]:
    """Names of the arguments of each function and class of the stub."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            inits = [x for x in node.body if isinstance(x, ast.FunctionDef) and "init" in x.name]
            if not inits:
                continue
            arguments = inits[0].args
            found[node.name] = [x.arg for x in (*arguments.args[1:], *arguments.kwonlyargs)]
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = [x.arg for x in (*node.args.args, *node.args.kwonlyargs)]
    return found


def test_the_stub_declares_what_is_bound() -> None:
    bound: dict[str, list[str]] = {}
    for name, value in vars(_kernels).items():
        signature = (value.__init__ if isinstance(value, type) else value).__doc__ or ""
        if not name.startswith("_"):
            names = re.findall(r"(\w+): ", signature.splitlines()[0])
            bound[name] = [x for x in names if x != "self"]
    for enum in ("DType", "Device"):
        del bound[enum]
    assert bound == _declared()
