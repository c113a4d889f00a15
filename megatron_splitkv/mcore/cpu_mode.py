"""CPU mode: Megatron's own training loop on a machine without a GPU, over gloo.

Megatron names CUDA in some four hundred places: `device="cuda"`, `.cuda()`, streams, events, its
random-number tracker. This module answers for the missing device instead of changing those places:

- a `TorchFunctionMode` rewrites CUDA devices to the CPU in every torch call of this thread,
- the functions of `torch.cuda` that Megatron calls get a CPU meaning (streams are in order, memory
  is the process's, the random state is the CPU generator's),
- three functions of Megatron are replaced: the CUDA check at start, the fusion warm-up (it draws
  random numbers by shape, so weights would depend on the context-parallel size), and the access to
  the random state, so that dropout is repeated exactly under recomputation.

It never activates where CUDA is available. The command-line settings that belong to it are in
`cpu_arguments`.
"""

import contextlib
import functools
import logging
import os
import resource
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import hooks

_CPU = torch.device("cpu")
_RNG_MODULE = "megatron.core.tensor_parallel.random"
_QUIET = (  # notices about GPU packages: on a machine without a GPU they say nothing new
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine",
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
    "'pin_memory' argument is set as true but no accelerator",
)

_active: "_CpuMode | None" = None


def install() -> bool:
    """Maps CUDA to the CPU for this process, once.

    Call it on the thread that trains, before Megatron's training modules are used.

    Returns:
        True if CPU mode is in force; False if CUDA is available and nothing was changed.
    """
    global _active
    if torch.cuda.is_available():
        return False
    if _active is None:
        _active = _CpuMode()
    return True


def uninstall() -> None:
    """Undoes `install`, on the same thread; does nothing where it is not in force."""
    global _active
    if _active is not None:
        _active.close()
        _active = None


def is_active() -> bool:
    """Whether CUDA is mapped to the CPU in this process."""
    return _active is not None


class _CpuMode:
    """Everything that CPU mode changes, held so that it can be undone."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._patches = hooks.Patches()
        self._set_environment()
        self._quiet()
        try:
            # Imports Megatron, and with it the compiler: it must see torch.cuda as torch made it.
            self._hooks = hooks.install(_megatron_replacements())
        except UnsupportedError:
            self._stack.close()
            raise
        for name, value in _torch_cuda().items():
            self._patches.set(torch.cuda, name, value)
        self._patches.set(torch.cuda.random, "get_rng_state", _get_rng_state)
        self._patches.set(torch.cuda.random, "set_rng_state", _set_rng_state)
        # Its argument is checked in C++ before the mode below could see the call.
        self._patches.set(torch.Tensor, "record_stream", _nothing)
        self._stack.enter_context(CudaAsCpu())

    def close(self) -> None:
        self._hooks.uninstall()
        self._patches.undo()
        self._stack.close()

    def _set_environment(self) -> None:
        """Turns the compiler off (fusions probe for a GPU) and satisfies a CUDA-only check."""
        for name, value in (("TORCHDYNAMO_DISABLE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")):
            if name not in os.environ:
                os.environ[name] = value
                self._stack.callback(os.environ.pop, name, None)
        config: Any = sys.modules.get("torch._dynamo.config")
        if config is not None:
            self._stack.callback(setattr, config, "disable", config.disable)
            config.disable = True

    def _quiet(self) -> None:
        for message in _QUIET:
            warnings.filterwarnings("ignore", message=message)
            self._stack.callback(_remove_filter, warnings.filters[0])
        self._stack.enter_context(_without_message(_RNG_MODULE, "CPU RNG state changed within GPU"))
        self._stack.enter_context(
            _without_message("torch.utils.cpp_extension", "No CUDA runtime is found")
        )


class CudaAsCpu(TorchFunctionMode):
    """Rewrites CUDA devices to the CPU in torch calls made on the thread that entered it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the torch function returns
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _same_tensor(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """`.cuda()` and `.pin_memory()`: the tensor is where it should be."""
    return tensor


def _to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return tensor.to(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _type(tensor: torch.Tensor, dtype: object = None, **kwargs: object) -> str | torch.Tensor:
    """`.type()` answers as on a GPU: Megatron's optimizers tell dtypes apart by that name."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return tensor.type(dtype, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _all_to_all_single(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Split sizes of experts, which Megatron brings to the host only from a GPU, as lists."""
    options = {name: _as_list(value) for name, value in kwargs.items()}
    return torch.distributed.all_to_all_single(*args[:2], *map(_as_list, args[2:]), **options)


def _as_list(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _nothing(*args: object, **kwargs: object) -> None:
    """Synchronization and bookkeeping of a device that works in order on the caller's thread."""


_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.distributed.all_to_all_single: _all_to_all_single,
}


class CpuStream:
    """A stream whose work is finished when the call that queued it returns."""

    device = _CPU

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> "CpuStream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        event = event or CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    wait_stream = wait_event = synchronize = _nothing


class CpuEvent:
    """An event that has always passed; elapsed times are those of the wall clock."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: CpuStream | None = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    wait = synchronize = _nothing


_STREAM = CpuStream()


def _torch_cuda() -> dict[str, object]:
    """What the functions of `torch.cuda` that Megatron calls mean without a GPU, by name."""
    stubs: dict[str, object] = {
        "Stream": CpuStream,
        "Event": CpuEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,  # one device per process, as Megatron expects
        "get_device_properties": _device_properties,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "cpu",
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        # not torch.manual_seed: that one calls torch.cuda.manual_seed_all
        "manual_seed": torch.default_generator.manual_seed,
        "memory_stats": lambda device=None: defaultdict(int),
    }
    for name in (
        "set_device",
        "set_stream",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
    ):
        stubs[name] = functools.partial(_nothing)  # one object a name: dynamo's rules tell by it
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        stubs[name] = _resident_bytes
    for name in ("max_memory_allocated", "max_memory_reserved"):
        stubs[name] = _peak_resident_bytes
    return stubs


def _device_properties(device: object = None) -> SimpleNamespace:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return SimpleNamespace(name="cpu", major=0, minor=0, total_memory=pages * page)


def _resident_bytes(device: object = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _get_rng_state(device: object = None, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None, **kwargs: object) -> None:
    torch.set_rng_state(new_state)


def _megatron_replacements() -> list[hooks.Replacement]:
    return [
        hooks.Replacement(
            target=f"{_RNG_MODULE}:_get_cuda_rng_state",
            function=_get_rng_state,
            signature=("device", "clone", "graph_safe"),
        ),
        hooks.Replacement(
            target=f"{_RNG_MODULE}:_set_cuda_rng_state",
            function=_set_rng_state,
            signature=("new_state", "device", "graph_safe"),
        ),
        hooks.Replacement(
            target="megatron.training.initialize:_warmup_jit_function",
            function=_nothing,
            signature=("tp_size",),
        ),
        hooks.Replacement(
            target="megatron.training.initialize:initialize_megatron",
            function=_initialize_without_cuda,
            also=("megatron.training.training",),
            signature=None,  # only its first parameter matters, and it is passed by name
            wraps=True,
        ),
    ]


def _initialize_without_cuda(
    original: Callable[..., Any], *args: object, **kwargs: object
) -> object:
    if not args:
        kwargs.setdefault("allow_no_cuda", True)
    return original(*args, **kwargs)


def _remove_filter(entry: object) -> None:
    with contextlib.suppress(ValueError):  # others may have replaced the list
        warnings.filters.remove(entry)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@contextlib.contextmanager
def _without_message(logger_name: str, start: str) -> Generator[None]:
    """Drops the log records of one logger that start with `start`."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(start)

    logger = logging.getLogger(logger_name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
