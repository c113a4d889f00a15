"""A process that waits for a rank that is gone must end."""

import signal
import subprocess
import sys
import time

from megatron_splitkv.comm import watchdog
from megatron_splitkv.comm.watchdog import Watchdog


class Light:
    def __init__(self) -> None:
        self.is_on = False

    def query(self) -> bool:
        return self.is_on


def test_only_what_takes_longer_than_the_timeout_is_overdue(monkeypatch):
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    monkeypatch.setattr(Watchdog, "_run", lambda self: None)
    dog = Watchdog("test", timeout_s=10.0)
    assert not dog.is_overdue()
    first, second = Light(), Light()
    dog.watch(first)
    now = 9.0
    dog.watch(second)
    assert not dog.is_overdue()
    first.is_on = True
    now = 18.0
    assert not dog.is_overdue(), "the second has its own time"
    now = 20.0
    assert dog.is_overdue()
    second.is_on = True
    assert not dog.is_overdue()


SCRIPT = """
import time
from megatron_splitkv.comm import watchdog
watchdog.POLL_S = 0.05
class Never:
    def query(self):
        return False
watchdog.Watchdog("symmetric memory of rank 1", timeout_s=0.2).watch(Never())
time.sleep(60)
"""


def test_the_process_ends_and_says_why():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert time.monotonic() - start < 30
    assert done.returncode == -signal.SIGABRT
    assert "symmetric memory of rank 1 has waited for 0 s: another rank of the group" in done.stderr
