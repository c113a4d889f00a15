"""Native attention kernels: csrc/attention/params.h and api.h tell what every argument means."""

from collections.abc import Sequence

from torch import Tensor

class DType:
    float32: DType
    bfloat16: DType
    float16: DType

class Device:
    cpu: Device
    cuda: Device

class Rows:
    def __init__(
        self, address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None: ...

class Launch:
    def __init__(
        self,
        *,
        device: Device,
        stream: int,
        workspace: int,
        workspace_bytes: int,
        num_threads: int,
        device_index: int,
    ) -> None: ...

def forward_workspace_bytes(
    *,
    device: Device,
    head_dim_qk: int,
    head_dim_v: int,
    num_threads: int,
    work_shape: Sequence[int],
) -> int: ...
def backward_workspace_bytes(
    *,
    device: Device,
    head_dim_qk: int,
    head_dim_v: int,
    num_threads: int,
    work_shape: Sequence[int],
    gradient_dtype: DType,
) -> int: ...
def forward(
    *,
    q: Rows | Tensor,
    k: Rows | Tensor,
    v: Rows | Tensor,
    kv_begin: int,
    kv_end: int,
    out: Rows | Tensor,
    lse: Rows | Tensor,
    softmax_scale: float,
    work: int,
    work_shape: Sequence[int],
    launch: Launch,
) -> None: ...
def backward(
    *,
    dout: Rows | Tensor,
    q: Rows | Tensor,
    k: Rows | Tensor,
    v: Rows | Tensor,
    lse: Rows | Tensor,
    delta: Rows | Tensor,
    kv_begin: int,
    kv_end: int,
    dq: Rows | Tensor,
    dk: Rows | Tensor,
    dv: Rows | Tensor,
    accumulates: bool,
    softmax_scale: float,
    work: int,
    work_shape: Sequence[int],
    launch: Launch,
) -> None: ...
def merge(
    *,
    out: Rows | Tensor,
    lse: Rows | Tensor,
    part_out: Rows | Tensor,
    part_lse: Rows | Tensor,
    part_scale: Rows | Tensor | None,
    part_ptr: int,
    part_slots: int,
    num_slots: int,
    accumulates: bool,
    launch: Launch,
) -> None: ...
def add(
    *,
    total: Rows | Tensor,
    parts: Rows | Tensor,
    part_scale: Rows | Tensor | None,
    part_ptr: int,
    part_slots: int,
    num_slots: int,
    accumulates: bool,
    launch: Launch,
) -> None: ...
def encode(
    *,
    values: Rows | Tensor,
    index: int,
    encoded: Rows | Tensor,
    scale: Rows | Tensor,
    lse: Rows | Tensor | None,
    sent_lse: Rows | Tensor | None,
    launch: Launch,
) -> None: ...
def pack(
    *,
    packed: int,
    num_rows: int,
    row_bytes: int,
    index: int,
    num_source_rows: int,
    sources: Sequence[int],
    row_strides: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    launch: Launch,
) -> None: ...
def cpu_isas() -> str: ...
def current_cpu_isa() -> str: ...
def force_cpu_isa(name: str) -> None: ...

class ForwardWork:
    def __init__(
        self,
        *,
        kv_begin: int,
        kv_end: int,
        num_rows: int,
        num_keys: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim_qk: int,
        head_dim_v: int,
        num_sms: int,
        family: str,
    ) -> None: ...
    @property
    def num_ints(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    def write(self, target: int) -> None: ...

class BackwardWork:
    def __init__(
        self,
        *,
        kv_begin: int,
        kv_end: int,
        num_rows: int,
        num_keys: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim_qk: int,
        head_dim_v: int,
        num_sms: int,
        family: str,
        is_deterministic: bool,
    ) -> None: ...
    @property
    def num_ints(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    def write(self, target: int) -> None: ...

def has_cuda_kernels() -> bool: ...
def cuda_family(major: int, minor: int) -> str: ...
def force_cuda_family(name: str) -> None: ...
def cuda_row_dot(
    *, a: Rows | Tensor, b: Rows | Tensor, sums: Rows | Tensor, launch: Launch
) -> None: ...
