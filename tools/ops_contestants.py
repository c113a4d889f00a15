"""Who computes attention in `bench_ops.py`: our kernels, torch's, FlashAttention-3 if installed.

A contestant makes two calls for a problem, forward and backward, that do nothing but what is to be
timed. Their results are in our layout, THD, so that one check serves all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from types import ModuleType

import torch
from ops_shapes import DTYPES, Shape, pile_lens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops import (
    WorkLists,
    attention_delta,
    partial_attention,
    partial_attention_backward,
)

Forward = Callable[[], Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]
Backward = Callable[[], Gradients]


class Problem:
    """Inputs of a shape, N(0, 1), and our forward results, which every backward of ours takes.

    Attributes:
        q, k, v, dout: `[rows, heads, head_dim]`, THD.
        begin, end: the keys that each row sees, `[rows]` int32.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int, dim: int) -> Tensor:
            drawn = torch.randn((tokens, heads, dim), generator=generator, device=device)
            return drawn.to(DTYPES[shape.dtype])

        (heads_q, heads_kv), (dim_qk, dim_v) = shape.heads, shape.head_dims
        begin, end = shape.intervals()
        rows, keys = len(begin), max(shape.keys, int(end.max()))
        self.q = normal(rows, heads_q, dim_qk)
        self.k, self.v = normal(keys, heads_kv, dim_qk), normal(keys, heads_kv, dim_v)
        self.dout = normal(rows, heads_q, dim_v)
        self.begin, self.end = begin.to(device), end.to(device)
        self.work = {
            is_deterministic: WorkLists(begin, end, is_deterministic=is_deterministic)
            for is_deterministic in (False, True)
        }
        self.num_pairs = int((end.long() - begin.long()).clamp(min=0).sum()) * heads_q
        self._key_gradients: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def key_gradients(self, *, is_rounded: bool) -> tuple[Tensor, Tensor]:
        """dk and dv that ours writes, or adds to: of the dtype of the inputs, or fp32."""
        dtype = self.k.dtype if is_rounded else torch.float32
        if dtype not in self._key_gradients:
            self._key_gradients[dtype] = (
                torch.empty_like(self.k, dtype=dtype),
                torch.empty_like(self.v, dtype=dtype),
            )
        return self._key_gradients[dtype]

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits."""
        return self.q.shape[-1] ** -0.5

    def attend(self) -> tuple[Tensor, Tensor]:
        """out and lse of our forward, fp32."""
        return partial_attention(
            self.q, self.k, self.v, self.begin, self.end, softmax_scale=self.softmax_scale,
            work=self.work[False],
        )  # fmt: skip

    @cached_property
    def documents(self) -> tuple[Tensor, int]:
        """`cu_seqlens` of packed documents, int32, and the longest length."""
        lens = pile_lens()
        return torch.tensor([0, *lens]).cumsum(0).int().to(self.device), max(lens)

    @cached_property
    def attended(self) -> tuple[Tensor, Tensor]:
        """out and lse, computed once."""
        return self.attend()


class Contestant(ABC):
    """One implementation.

    Attributes:
        name: for the tables.
        is_ours: whether a wrong result ends the run, or only leaves this contestant out.
        accumulates: whether the backward adds to dk and dv, which must be zero for a check.
        is_rounded: whether dk and dv have the dtype of the inputs; else they are fp32.
        ops: which of "forward" and "backward" are timed.
    """

    name: str
    is_ours = False
    accumulates = False
    is_rounded = True
    ops: tuple[str, ...] = ("forward", "backward")

    def refusal(self, shape: Shape) -> str | None:
        """Why the shape cannot be run, or None."""
        return None

    @abstractmethod
    def forward(self, problem: Problem) -> Forward:
        """A call that returns out, `[rows, heads_q, head_dim_v]`."""

    @abstractmethod
    def backward(self, problem: Problem) -> Backward:
        """A call that returns dq, dk, dv, THD."""


class Ours(Contestant):
    """This package: fp32 out, and a backward that includes delta, for libraries compute it too."""

    is_ours = True

    def __init__(
        self,
        name: str,
        *,
        family: str = "auto",
        ops: tuple[str, ...] = ("forward", "backward"),
        is_rounded: bool = True,
        accumulates: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        """Takes a kernel family, "auto" for the fastest, and the mode of the backward."""
        self.name = name
        self.family = family
        self.ops = ops
        self.is_rounded = is_rounded
        self.accumulates = accumulates
        self.is_deterministic = is_deterministic

    def refusal(self, shape: Shape) -> str | None:
        if self.family == "auto":
            return None
        taken = _kernels.cuda_family(*torch.cuda.get_device_capability())
        return None if taken != self.family else "is what this GPU runs anyway"

    def forward(self, problem: Problem) -> Forward:
        def call() -> Tensor:
            with _kernel_family(self.family):
                return problem.attend()[0]

        return call

    def backward(self, problem: Problem) -> Backward:
        out, lse = problem.attended
        # What a layer keeps is out in the dtype of its inputs.
        out = out.to(problem.q.dtype)
        dk, dv = problem.key_gradients(is_rounded=self.is_rounded)

        def call() -> Gradients:
            with _kernel_family(self.family):
                delta = attention_delta(problem.dout, out)
                dq = partial_attention_backward(
                    problem.dout, problem.q, problem.k, problem.v, lse, delta, problem.begin,
                    problem.end, dk, dv, softmax_scale=problem.softmax_scale,
                    accumulate=self.accumulates, work=problem.work[self.is_deterministic],
                )  # fmt: skip
            return dq, dk, dv

        return call


@contextmanager
def _kernel_family(name: str) -> Generator[None]:
    _kernels.force_cuda_family(name)
    try:
        yield
    finally:
        _kernels.force_cuda_family("auto")


class Library(Contestant):
    """Attention with an autograd of its own: the backward alone is timed, on a recorded graph."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        """Attention in the layout of the library."""

    def to_layout(self, tensor: Tensor) -> Tensor:
        """THD to the layout of the library: by default BSHD, one sequence."""
        return tensor[None]

    def to_thd(self, tensor: Tensor) -> Tensor:
        """And back."""
        return tensor[0]

    def forward(self, problem: Problem) -> Forward:
        q, k, v = (self.to_layout(x) for x in (problem.q, problem.k, problem.v))

        def call() -> Tensor:
            with torch.no_grad():
                return self.to_thd(self.attend(q, k, v, problem))

        return call

    def backward(self, problem: Problem) -> Backward:
        tensors = (problem.q, problem.k, problem.v)
        q, k, v = leaves = [self.to_layout(x).detach().requires_grad_() for x in tensors]
        dout = self.to_layout(problem.dout)
        with torch.enable_grad():
            out = self.attend(q, k, v, problem)

        def call() -> Gradients:
            dq, dk, dv = torch.autograd.grad(out, leaves, dout.to(out.dtype), retain_graph=True)
            return self.to_thd(dq), self.to_thd(dk), self.to_thd(dv)

        return call


class Sdpa(Library):
    """torch's `scaled_dot_product_attention` with given backends, contiguous BHSD."""

    def __init__(self, name: str, *backends: SDPBackend) -> None:
        self.name = name
        self.backends = list(backends)

    def refusal(self, shape: Shape) -> str | None:
        if shape.mask not in ("full", "causal"):
            return f"has no call for {shape.mask} documents without padding"
        if self.backends == [SDPBackend.FLASH_ATTENTION] and len(set(shape.head_dims)) > 1:
            return "needs one head dim for q, k and v"
        return None

    def to_layout(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)[None].contiguous()

    def to_thd(self, tensor: Tensor) -> Tensor:
        return tensor[0].transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        is_causal = problem.shape.mask == "causal"
        with sdpa_kernel(self.backends):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


class TorchVarlen(Library):
    """FlashAttention-2 as torch brings it, for packed documents."""

    name = "fa2"

    def refusal(self, shape: Shape) -> str | None:
        return None if shape.mask == "packed" else "is for packed documents"

    def to_layout(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_thd(self, tensor: Tensor) -> Tensor:
        return tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        starts, longest = problem.documents
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out


class FlashAttention3(Library):
    """The `flash_attn_interface` package, where it is installed."""

    name = "fa3"
    HEAD_DIMS = (64, 128, 256)

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.fault = ""
        try:
            self.module = import_module("flash_attn_interface")
        except (ImportError, OSError) as error:
            self.fault = str(error)

    def refusal(self, shape: Shape) -> str | None:
        dim_qk, dim_v = shape.head_dims
        if self.module is None:
            return f"cannot be imported: {self.fault}"
        if shape.mask == "scattered":
            return "has no call for scattered documents"
        if dim_qk != dim_v or dim_qk not in self.HEAD_DIMS:
            return f"is timed with head dims {', '.join(map(str, self.HEAD_DIMS))}"
        if shape.mask == "packed" and "varlen" in self.left_out():
            return "this build has no varlen"
        if shape.dtype == "fp16" and "fp16" in self.left_out():
            return "this build has no fp16"
        return None

    def left_out(self) -> list[str]:
        """Features that the build was made without."""
        try:
            flags: dict[str, bool] = import_module("flash_attn_config").CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            return []
        prefix = "FLASHATTENTION_DISABLE_"
        return [
            name.removeprefix(prefix).lower()
            for name, is_disabled in flags.items()
            if is_disabled and name.startswith(prefix)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        assert self.module is not None
        mask = problem.shape.mask
        if mask != "packed":
            return self.module.flash_attn_func(q, k, v, causal=mask == "causal")
        starts, longest = problem.documents
        thd = self.module.flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, longest, longest, causal=True
        )
        return thd[None]


def contestants(device: torch.device) -> list[Contestant]:
    """Everyone who may run on the device, ours first; two of one name share the shapes."""
    backward = ("backward",)
    found: list[Contestant] = [
        Ours("ours"),
        Ours("ours fp32", ops=backward, is_rounded=False),
        Ours("ours accumulating", ops=backward, is_rounded=False, accumulates=True),
    ]
    if device.type != "cuda":
        return [*found, Sdpa("torch", SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)]
    return [
        *found,
        Ours("ours deterministic", ops=backward, is_deterministic=True),
        Ours("ours sm80", family="sm80"),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        FlashAttention3(),
        Sdpa("fa2", SDPBackend.FLASH_ATTENTION),
        TorchVarlen(),
    ]
