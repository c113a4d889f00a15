"""What a stream does without a kernel: copies between GPUs, and flags that it writes and awaits.

Copy engines and the front end of the GPU do it, so it costs no SM and passes by kernels that fill
the device. A flag is a 32-bit word; a wait is over when `flag - value >= 0` as signed numbers, so
that counts may wrap around.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

_WORD = 0xFFFFFFFF
_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WRITE_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence for the whole system
FLAG_BYTES = 4


def write_flag(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Writes `value` once all that the stream holds is done and visible, also to peers.

    Args:
        address: of the flag, in this device's memory or in that of a peer mapped here.
    Raises:
        RuntimeError: the driver refuses.
    """
    _call("cuStreamWriteValue32_v2", stream.cuda_stream, address, value & _WORD, _WRITE_DEFAULT)


def wait_for_flag(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Holds back what the stream gets from now on until the flag has reached `value`.

    Raises:
        RuntimeError: the driver refuses.
    """
    _call("cuStreamWaitValue32_v2", stream.cuda_stream, address, value & _WORD, _WAIT_GEQ)


def has_reached(flag: int, value: int) -> bool:
    """What `wait_for_flag` waits for, of a flag that the host reads."""
    return (flag - value) & _WORD < 1 << 31


def copy_bytes(stream: torch.cuda.Stream, target: int, source: int, num_bytes: int) -> None:
    """Copies between two addresses that are mapped here, of this device or of a peer.

    Raises:
        RuntimeError: the driver refuses.
    """
    _call("cuMemcpyAsync", target, source, num_bytes, stream.cuda_stream)


# Each handle and address is 64 bits wide; of the others, ctypes passes what the driver takes.
_ARGUMENTS = {
    "cuStreamWriteValue32_v2": (
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    ),
    "cuStreamWaitValue32_v2": (
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    ),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
}  # fmt: skip


def _call(name: str, *arguments: int) -> None:
    status = _function(name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with code {status}")


@cache
def _function(name: str) -> Callable[..., int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = _ARGUMENTS[name]
    function.restype = ctypes.c_int
    return function
