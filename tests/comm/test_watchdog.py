"""A process that waits for a rank that is gone must end."""

import signal
import subprocess
import sys
import time

from megatron_splitkv.comm import watchdog
from megatron_splitkv.comm.watchdog import Watchdog


def test_only_what_takes_longer_than_the_timeout_is_overdue(monkeypatch):
    now, finished = 0.0, 0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    monkeypatch.setattr(Watchdog, "_run", lambda self: None)
    dog = Watchdog("test", timeout_s=10.0, has_finished=lambda number: number <= finished)
    assert dog.overdue() is None
    dog.watch(1)
    now = 9.0
    dog.watch(2)
    assert dog.overdue() is None
    finished = 1
    now = 18.0
    assert dog.overdue() is None, "the second has its own time"
    now = 20.0
    assert dog.overdue() == 2
    finished = 2
    assert dog.overdue() is None


SCRIPT = """
import sys, time
from megatron_splitkv.comm import watchdog
watchdog.POLL_S = 0.05
sys.stderr.close()  # what a script did to its own stream must not save it
watchdog.Watchdog("symmetric memory of rank 1", 0.2, lambda number: False).watch(7)
def held_up():
    time.sleep(60)
held_up()
"""


def test_the_process_ends_and_says_why():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert time.monotonic() - start < 30
    assert done.returncode == -signal.SIGABRT
    assert "symmetric memory of rank 1: collective 7 has not finished for 0.2 s" in done.stderr
    assert "another rank of the group has stopped or is late" in done.stderr
    assert "give a longer --distributed-timeout-minutes" in done.stderr
    assert "in held_up" in done.stderr, "where it waited"
