"""Ranks of a check: started on this machine, or joined where a launcher started them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist
from torch.cuda import nccl

from megatron_splitkv.comm import Transport, transport_of

GRACE_S = 10.0  # after a first failure: time for the other ranks to say what they saw
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All processes of a check.

    Attributes:
        rank, size: this process among all.
        device: of this process's tensors.
        backend: "nccl" or "gloo".
    """

    rank: int
    size: int
    device: torch.device
    backend: str

    @property
    def transport(self) -> str:
        """`SplitKVConfig.transport`: GPUs over gloo, as when ranks share one, must be asked for."""
        return "gloo" if (self.device.type, self.backend) == ("cuda", "gloo") else "auto"


def is_launched() -> bool:
    """Whether a launcher such as torchrun gave this process a rank, or a group exists already."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def available_backends() -> dict[str, bool]:
    """Which process-group backends this torch holds."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def nccl_version() -> str:
    """Version of the NCCL that torch was built with, as in 2.28.9."""
    return ".".join(str(part) for part in nccl.version())


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a local rank; several ranks share a GPU where there are fewer GPUs.

    Args:
        wanted: "cpu", "cuda", or "auto" for a GPU if there is one.
    Raises:
        ValueError: a GPU is wanted and torch finds none.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise ValueError(
            "--device cuda, but torch finds no GPU; python -m megatron_splitkv.doctor says why"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(wanted: str, device: torch.device, local_size: int) -> str:
    """NCCL where each local rank has a GPU of its own, gloo elsewhere, unless one is asked for.

    Raises:
        ValueError: NCCL is wanted and a local rank has no GPU of its own.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if wanted == "nccl" and num_gpus < local_size:
        raise ValueError(
            f"--backend nccl needs a GPU for each local rank, got {num_gpus} GPUs for "
            f"{local_size}; leave --backend out to have gloo take their place"
        )
    return ("nccl" if num_gpus >= local_size else "gloo") if wanted == "auto" else wanted


@contextlib.contextmanager
def join_world(*, device: str, backend: str, timeout_s: float) -> Generator[World]:
    """The world of this process: a group that exists, one that torchrun's variables describe, or
    this process alone.

    Args:
        device: "auto", "cpu" or "cuda".
        backend: "auto", "nccl" or "gloo".
        timeout_s: of a collective, after which a stalled rank is an error.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = choose_device(device, local_rank)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    if dist.is_initialized():
        name = dist.get_backend()
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=mine, backend=name)
        return
    chosen = choose_backend(backend, mine, local_size)
    is_alone = not is_launched()
    dist.init_process_group(
        chosen,
        init_method=f"tcp://127.0.0.1:{free_port()}" if is_alone else None,
        rank=0 if is_alone else -1,
        world_size=1 if is_alone else -1,
        timeout=timedelta(seconds=timeout_s),
        device_id=mine if chosen == "nccl" else None,
    )
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=mine, backend=chosen)
    finally:
        dist.destroy_process_group()


def cp_transport(world: World, cp_size: int, choice: str = "auto") -> Transport | None:
    """The context-parallel group of this process: `cp_size` consecutive ranks; None for one rank.

    Args:
        choice: as `SplitKVConfig.transport`.
    Raises:
        ValueError: the world does not split into groups of `cp_size`, or the choice cannot be had.
    """
    if world.size % cp_size:
        raise ValueError(
            f"--cp {cp_size} must divide the {world.size} processes that were started; start a "
            "multiple of it, or leave --cp out"
        )
    mine = None
    for first in range(0, world.size, cp_size):
        group = dist.new_group(list(range(first, first + cp_size)))
        if first <= world.rank < first + cp_size:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return transport_of(mine, world.device, world.transport if choice == "auto" else choice)


def gather_from_all[T](value: T, world: World) -> list[T]:
    """The value of every process of the world, in rank order, on every process."""
    if world.size == 1:
        return [value]
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(
    module: str,
    argv: Sequence[str],
    size: int,
    timeout_s: float,
    watch: Callable[[], None] = lambda: None,
) -> int:
    """Runs `python -m module argv` on `size` local ranks, as torchrun would.

    The first rank writes to this terminal; what the others wrote is shown if they failed.

    Args:
        timeout_s: for the whole run, after which every rank is ended.
        watch: called again and again while they run.
    Returns:
        The exit code: 0 if every rank left with 0, else that of the first rank that did not.
    """
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", _share_of_cores(size)),
    }
    command = [sys.executable, "-m", module, *argv]
    with contextlib.ExitStack() as stack:
        logs = [None, *(stack.enter_context(_log_file()) for _ in range(1, size))]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            code = _wait_for(processes, timeout_s, watch)
        finally:
            _end(processes)
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
            if process.returncode != 0 and log is not None:
                log.seek(0)
                text = log.read()
                print(f"--- rank {rank} ---\n{text}" if text else "", end="", file=sys.stderr)
    return code


def _share_of_cores(size: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // size))


def _log_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _wait_for(
    processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float, watch: Callable[[], None]
) -> int:
    """Waits for all ranks, or shortly beyond a first failure, or until the time is over."""
    deadline = time.monotonic() + timeout_s
    first_failure = 0
    while any(process.poll() is None for process in processes):
        codes = [process.returncode for process in processes if process.returncode]
        if codes and not first_failure:
            first_failure = codes[0]
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(processes) if process.poll() is None]
            why = "after another rank failed" if first_failure else f"after {timeout_s:.0f} s"
            print(f"ranks {running} were still running {why} and were ended", file=sys.stderr)
            return first_failure or 1
        watch()
        time.sleep(POLL_S)
    return next((abs(process.returncode) for process in processes if process.returncode), 0)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
