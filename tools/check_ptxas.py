"""Reads what nvcc said about the CUDA kernels and fails on what would make them slow.

A kernel must not spill more than 32 bytes, and no wgmma may be serialized (C7510 to C7519).
Compile with `-Xptxas -v`.

Usage: python tools/check_ptxas.py LOG...
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SPILL_BYTES = 32  # a few values saved outside the main loop; more means an array
ENTRY = re.compile(r"Compiling entry function '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(r"\bC751\d\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Resources of one kernel."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def parse_log(text: str) -> Iterator[Kernel]:
    """Yields the kernels of one log, in order."""
    name, stack, spill = "", 0, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            name = match[1]
        elif match := SPILLS.search(line):
            stack, spill = int(match[1]), max(int(match[2]), int(match[3]))
        elif name and (match := REGISTERS.search(line)):
            yield Kernel(name=name, registers=int(match[1]), stack_bytes=stack, spill_bytes=spill)
            name = ""


def faults_of(text: str) -> list[str]:
    """What is wrong with the kernels of one log."""
    faults = [line.strip() for line in text.splitlines() if SERIALIZED.search(line)]
    for kernel in parse_log(text):
        if kernel.spill_bytes > MAX_SPILL_BYTES:
            faults.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
        elif kernel.stack_bytes > MAX_SPILL_BYTES:
            faults.append(f"{kernel.name} keeps {kernel.stack_bytes} bytes in local memory")
    return faults


def main() -> int:
    """Prints every fault; returns 1 if there is one, or if a log names no kernel."""
    faults: list[str] = []
    num_kernels = 0
    for path in map(Path, sys.argv[1:]):
        text = path.read_text()
        found = len(list(parse_log(text)))
        num_kernels += found
        if found == 0:
            faults.append(f"{path}: no kernel in the log; compile with -Xptxas -v")
        faults += [f"{path}: {fault}" for fault in faults_of(text)]
    print("\n".join([*faults, f"check_ptxas: {num_kernels} kernels, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
