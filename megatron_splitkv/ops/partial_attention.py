"""Attention of query rows to the keys that this rank holds, and its backward.

Row i sees the local keys `[kv_begin[i], kv_end[i])`, none where `kv_begin[i] >= kv_end[i]`. Query
head h reads KV head `h // (Hq // Hkv)`. Autograd lives in `attention.py`, not here: the softmax of
the backward is that of the merged result, which a single partial does not know.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.ops.cuda import backward_work, forward_work
from megatron_splitkv.ops.native import (
    INPUT_DTYPES,
    as_address,
    check_attention_inputs,
    check_no_grad,
    check_tensor,
    launch_on,
    native_device,
    native_dtype,
    no_outputs,
    register_op,
)
from megatron_splitkv.ops.work_lists import WorkLists


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    *,
    softmax_scale: float,
    out_dtype: torch.dtype = torch.float32,
    work: WorkLists | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query row over its own interval of the local keys.

    The result is bitwise the same for any number of threads, and from run to run on a GPU. Query
    rows that see no key, and keys that no row sees, may hold NaN. Values that no row sees may, too,
    on the CPU; on CUDA they must be finite.

    Args:
        q: query rows, `[Tq, Hq, D]`, fp32, bf16 or fp16; last dimension contiguous, D <= 512.
        k: keys, `[Tk, Hkv, D]`, dtype of q; Hkv divides Hq.
        v: values, `[Tk, Hkv, Dv]`, dtype of q; Dv <= 512, it may differ from D.
        kv_begin: first visible key of each row, `[Tq]`, int32.
        kv_end: one past the last visible key of each row, `[Tq]`, int32.
        softmax_scale: factor of the logits `q . k`.
        out_dtype: fp32, bf16 or fp16; accumulation is fp32 in any case.
        work: work lists made from the same intervals, needed on CUDA alone.
    Returns:
        out `[Tq, Hq, Dv]` in out_dtype and lse `[Tq, Hq]` fp32, natural log. A row that sees no
        key has out = 0 and lse = -inf.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, an interval leaves `[0, Tk)`, or
            an argument requires a gradient (see `attention.py` for the op that has one).
        UnsupportedError: there is no kernel for the device of q, or on CUDA for its dtype or the
            head dims.
    Source: online softmax, Milakov and Gimelshein 2018; tiling, FlashAttention, Dao et al. 2022.
    """
    check_attention_inputs(q, k, v, kv_begin, kv_end)
    check_no_grad("partial_attention", q=q, k=k, v=v)
    if out_dtype not in INPUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype} must be float32, bfloat16 or float16")
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=out_dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    run_forward(q, k, v, kv_begin, kv_end, out, lse, softmax_scale=softmax_scale, work=work)
    return out, lse


def partial_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    softmax_scale: float,
    accumulate: bool = True,
    work: WorkLists | None = None,
) -> Tensor:
    """Gradients of the merged attention that flow through the local keys.

    With p = exp(softmax_scale * q.k - lse) and ds = p * (dout.v - delta): dq = softmax_scale * ds.k
    is returned, `dk += softmax_scale * ds^T.q` and `dv += p^T.dout` are added in place, or written
    without accumulate. Summing dq over the partials gives the gradient of the whole.

    Bitwise the same for any number of threads. On a GPU dk and dv are the same from run to run, and
    so is dq if the work lists say `is_deterministic`; there every row of q, k, v and dout must be
    finite, also those that are not seen or see nothing.

    Args:
        dout: gradient of the merged output, `[Tq, Hq, Dv]`, fp32, bf16 or fp16.
        q: query rows, `[Tq, Hq, D]`, as in the forward.
        k: keys, `[Tk, Hkv, D]`, dtype of q.
        v: values, `[Tk, Hkv, Dv]`, dtype of q.
        lse: log-sum-exp of the merged result, `[Tq, Hq]`, fp32, natural log.
        delta: `rowsum(dout * out)` of the merged output, `[Tq, Hq]`, fp32.
        kv_begin: first visible key of each row, `[Tq]`, int32.
        kv_end: one past the last visible key of each row, `[Tq]`, int32.
        dk: `[Tk, Hkv, D]`, fp32, accumulated into; without accumulate also in the dtype of q.
        dv: `[Tk, Hkv, Dv]`, dtype of dk, accumulated into.
        softmax_scale: factor of the logits, as in the forward.
        accumulate: False for the first of several calls: dk and dv may hold anything, every row is
            written. Saves clearing them, and with few query rows half of the time on a GPU. In the
            dtype of q they are the fp32 sums, rounded once: for a call that is the only one.
        work: work lists made from the same intervals, needed on CUDA alone.
    Returns:
        dq `[Tq, Hq, D]`, fp32; 0 for a row that sees no local key or has lse = -inf, whose q and
        dout are never read on the CPU.
    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, an interval leaves `[0, Tk)`, or
            an argument requires a gradient (see `attention.py` for the op that has one).
        UnsupportedError: there is no kernel for the device of q, or on CUDA for its dtype or the
            head dims.
    """
    check_attention_inputs(q, k, v, kv_begin, kv_end)
    num_rows, num_heads_q, head_dim_qk = q.shape
    num_keys, num_heads_kv, head_dim_v = v.shape
    fp32 = (torch.float32,)
    if accumulate and dk.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"dk has dtype {dk.dtype}, but accumulate=True sums over calls in float32; pass "
            "float32 tensors, or accumulate=False where this call is the only one"
        )
    key_gradients = fp32 if accumulate or q.dtype in fp32 else (*fp32, q.dtype)
    shapes = (
        ("dout", dout, (num_rows, num_heads_q, head_dim_v), INPUT_DTYPES),
        ("lse", lse, (num_rows, num_heads_q), fp32),
        ("delta", delta, (num_rows, num_heads_q), fp32),
        ("dk", dk, (num_keys, num_heads_kv, head_dim_qk), key_gradients),
        ("dv", dv, (num_keys, num_heads_kv, head_dim_v), (dk.dtype,)),
    )
    for name, tensor, shape, dtypes in shapes:
        check_tensor(name, tensor, shape=shape, dtypes=dtypes, device=q.device)
    check_no_grad("partial_attention_backward", dout=dout, q=q, k=k, v=v)
    on_device = backward_work(q, k, v, work) if q.is_cuda else None
    dq = q.new_empty(q.shape, dtype=torch.float32)
    torch.ops.megatron_splitkv.partial_attention_backward_.default(
        dout, q, k, v, lse, delta, kv_begin, kv_end, dq, dk, dv, softmax_scale=softmax_scale,
        accumulate=accumulate,
        work=None if on_device is None else on_device.items,
        work_shape=() if on_device is None else on_device.shape,
    )  # fmt: skip
    return dq


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    work: WorkLists | None = None,
) -> None:
    """`partial_attention` into tensors that may be views of larger ones, without its checks, for
    callers that made the arguments themselves.
    """
    on_device = forward_work(q, k, v, work) if q.is_cuda else None
    torch.ops.megatron_splitkv.partial_attention_.default(
        q, k, v, kv_begin, kv_end, out, lse, softmax_scale=softmax_scale,
        work=None if on_device is None else on_device.items,
        work_shape=() if on_device is None else on_device.shape,
    )  # fmt: skip


def _workspace(
    num_bytes: Callable[..., int], q: Tensor, v: Tensor, work_shape: Sequence[int], **more: object
) -> Tensor:
    size = num_bytes(
        device=native_device(q.device),
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
        num_threads=torch.get_num_threads(),
        work_shape=work_shape,
        **more,
    )
    return q.new_empty(size, dtype=torch.uint8)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    work: Tensor | None = None,
    work_shape: Sequence[int] = (),
) -> None:
    workspace = _workspace(_kernels.forward_workspace_bytes, q, v, work_shape)
    _kernels.forward(
        q=q,
        k=k,
        v=v,
        kv_begin=kv_begin.data_ptr(),
        kv_end=kv_end.data_ptr(),
        out=out,
        lse=lse,
        softmax_scale=softmax_scale,
        work=as_address(work),
        work_shape=work_shape,
        launch=launch_on(q.device, workspace),
    )


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    softmax_scale: float,
    accumulate: bool = True,
    work: Tensor | None = None,
    work_shape: Sequence[int] = (),
) -> None:
    dk_sum, dv_sum = dk, dv
    if q.is_cuda:  # where the kernels take one input dtype
        dout = dout.to(q.dtype)
    elif not accumulate:  # the CPU kernels only add, and only in fp32
        dk_sum, dv_sum = (x.zero_().float() for x in (dk, dv))
    workspace = _workspace(
        _kernels.backward_workspace_bytes, q, v, work_shape, gradient_dtype=native_dtype(dk.dtype)
    )
    _kernels.backward(
        dout=dout,
        q=q,
        k=k,
        v=v,
        lse=lse,
        delta=delta,
        kv_begin=kv_begin.data_ptr(),
        kv_end=kv_end.data_ptr(),
        dq=dq,
        dk=dk_sum,
        dv=dv_sum,
        accumulates=accumulate or not q.is_cuda,
        softmax_scale=softmax_scale,
        work=as_address(work),
        work_shape=work_shape,
        launch=launch_on(q.device, workspace),
    )
    if dk_sum.dtype != dk.dtype:
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


register_op(
    "partial_attention_",
    "(Tensor q, Tensor k, Tensor v, Tensor kv_begin, Tensor kv_end, Tensor(a!) out, "
    "Tensor(b!) lse, *, float softmax_scale, Tensor? work=None, int[] work_shape=[]) -> ()",
    native=_forward,
    fake=no_outputs,
    twin="partial_attention",
)
register_op(
    "partial_attention_backward_",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, Tensor kv_begin, "
    "Tensor kv_end, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, *, float softmax_scale, "
    "bool accumulate=True, Tensor? work=None, int[] work_shape=[]) -> ()",
    native=_backward,
    fake=no_outputs,
    twin="partial_attention_backward",
)
