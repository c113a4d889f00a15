"""Real processes for tests: runs a function on N gloo ranks and reports the rank that failed.

One pool for each world size lives as long as the test process, so only the first test of a size
pays for it. The ranks are forked from a server that has imported torch and run nothing, which is
fast and safe. A failure or a timeout ends the pool; the next test starts a fresh one.
"""

import atexit
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT_S = 60.0
EXIT_S = 5.0  # until a rank that has closed its pipe has ended
PRELOADED = [  # what ranks would else import one by one; torch's is for its deterministic mode
    "pytest",
    "hypothesis.strategies",
    "torch._inductor.config",
    "megatron_splitkv.attention",
    "tests.ranks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank: a value, or the text of its error, or neither after a timeout."""

    value: Any = None
    error: str | None = None
    is_done: bool = True


class GlooError(AssertionError):
    """A rank failed or hung; the message holds its traceback."""


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    """Life of one rank: joins the group, then runs what it is given until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    while True:
        try:
            body, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # not the group's clean-up: other ranks may be gone already
        try:
            outcome = Outcome(value=body(*arguments))
        except Exception:
            outcome = Outcome(error=f"rank {rank} of {size}:\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(outcome))  # by value: pipe.send would share file descriptors


class _Pool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = TemporaryDirectory(prefix="gloo-")
        rendezvous = str(Path(self.folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, body: Callable[..., Any], arguments: tuple, timeout_s: float) -> list[Outcome]:
        """Runs `body(*arguments)` on every rank; stops early once a rank has failed."""
        message = pickle.dumps((body, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        outcomes = [Outcome(is_done=False)] * len(self.pipes)
        deadline = time.monotonic() + timeout_s
        while waiting := [
            pipe for pipe, outcome in zip(self.pipes, outcomes, strict=True) if not outcome.is_done
        ]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(EXIT_S)
                    code = self.processes[rank].exitcode
                    outcomes[rank] = Outcome(error=f"rank {rank} died with exit code {code}")
            if any(outcome.error for outcome in outcomes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def close(self) -> None:
        """Ends every rank, also one that hangs in a collective."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


GRACE_S = 10.0  # after a first failure: time for the other ranks to fail too
_POOLS: dict[int, _Pool] = {}


def run_outcomes(
    size: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Outcome]:
    """Runs `body(*arguments)` on `size` gloo ranks; what became of each, in rank order.

    Args:
        size: ranks; inside `body` they are `torch.distributed.group.WORLD`.
        body: a function of a module, so that it can be pickled, as must be its result.
        arguments: given to every rank alike.
        timeout_s: after it, ranks that have not finished are ended.
    """
    if size not in _POOLS:
        _POOLS[size] = _Pool(size)
    outcomes = _POOLS[size].run(body, arguments, timeout_s)
    if not all(outcome.is_done and outcome.error is None for outcome in outcomes):
        _POOLS.pop(size).close()
    return outcomes


def run_gloo(
    size: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Like `run_outcomes`, but returns the values and raises when a rank failed.

    Raises:
        GlooError: with the tracebacks of the ranks that failed, and which ranks hung.
    """
    outcomes = run_outcomes(size, body, *arguments, timeout_s=timeout_s)
    failures = [outcome.error for outcome in outcomes if outcome.error]
    hung = [rank for rank, outcome in enumerate(outcomes) if not outcome.is_done]
    if hung and not failures:
        failures.append(f"hung for {timeout_s} s")
    if failures or hung:
        raise GlooError("\n".join([*failures, f"ranks that did not finish: {hung}"]))
    return [outcome.value for outcome in outcomes]


@atexit.register
def _close_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()
