"""Native attention kernels: see csrc/attention/params.h for the meaning of every argument."""

class DType:
    float32: DType
    bfloat16: DType
    float16: DType

class Device:
    cpu: Device
    cuda: Device

class Rows:
    def __init__(
        self,
        *,
        data: int,
        dtype: DType,
        rows: int,
        heads: int,
        dim: int,
        row_stride: int,
        head_stride: int,
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
    ) -> None: ...

def forward_workspace_bytes(*, head_dim_qk: int, head_dim_v: int, num_threads: int) -> int: ...
def backward_workspace_bytes(*, head_dim_qk: int, head_dim_v: int, num_threads: int) -> int: ...
def forward(
    *,
    q: Rows,
    k: Rows,
    v: Rows,
    kv_begin: int,
    kv_end: int,
    out: Rows,
    lse: Rows,
    softmax_scale: float,
    launch: Launch,
) -> None: ...
def backward(
    *,
    dout: Rows,
    q: Rows,
    k: Rows,
    v: Rows,
    lse: Rows,
    delta: Rows,
    kv_begin: int,
    kv_end: int,
    dq: Rows,
    dk: Rows,
    dv: Rows,
    softmax_scale: float,
    launch: Launch,
) -> None: ...
def merge(
    *,
    out: Rows,
    lse: Rows,
    part_out: Rows,
    part_lse: Rows,
    part_ptr: int,
    part_slots: int,
    num_slots: int,
    launch: Launch,
) -> None: ...
def cpu_isas() -> str: ...
def current_cpu_isa() -> str: ...
def force_cpu_isa(name: str) -> None: ...
