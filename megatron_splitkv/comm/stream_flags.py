"""Flags in device memory that a stream writes and waits for, without a kernel.

The front end of the GPU does both, so they cost no SM and pass by kernels that fill the device. A
flag is a 32-bit word; a wait is over when `flag - value >= 0` as signed numbers, so that counts may
wrap around.
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
    _call("cuStreamWriteValue32_v2", stream, address, value, _WRITE_DEFAULT)


def wait_for_flag(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Holds back what the stream gets from now on until the flag has reached `value`.

    Raises:
        RuntimeError: the driver refuses.
    """
    _call("cuStreamWaitValue32_v2", stream, address, value, _WAIT_GEQ)


def _call(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    status = _function(name)(stream.cuda_stream, address, value & _WORD, flags)
    if status != 0:
        raise RuntimeError(f"{name} failed with code {status}")


@cache
def _function(name: str) -> Callable[[int, int, int, int], int]:
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function
