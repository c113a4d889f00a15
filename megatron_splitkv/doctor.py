"""`python -m megatron_splitkv.doctor`: what is here, what would be used, and what is missing.

Looks at versions, native modules, GPUs and their kernels, transports, and the names of Megatron
that the launcher replaces. Works without a GPU, without Megatron, and before anything was built.
The exit code is 0 unless something that is needed is broken.

examples:
  python -m megatron_splitkv.doctor
  python -m megatron_splitkv.doctor --json
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from megatron_splitkv.checks.inventory import Finding, take_inventory

COLORS = {"ok": "green", "absent": "yellow", "broken": "bold red"}
WIDTH_IN_A_FILE = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Looks, prints, returns the exit code.

    Args:
        argv: options, by default those of the command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_splitkv.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    findings = [*take_inventory(), *inspect_megatron()]
    is_broken = any(finding.state == "broken" for finding in findings)
    if args.json:
        lines = [asdict(finding) for finding in findings]
        print(json.dumps({"is_ok": not is_broken, "findings": lines}))
    else:
        print_findings(findings)
    return int(is_broken)


def inspect_megatron() -> Iterator[Finding]:
    """Whether Megatron is there, is a version that we know, and has what the hooks replace."""
    topic = "Megatron"
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        yield Finding(
            topic=topic, name="megatron-core", state="absent", found="not installed",
            remedy="pip install megatron-core==0.19.2 to train; attention and planning need none",
        )  # fmt: skip
        return
    try:
        warnings.simplefilter("ignore")
        for name in ("megatron", "torch.utils.cpp_extension"):
            logging.getLogger(name).setLevel(logging.ERROR)
        from megatron_splitkv.mcore.health import TESTED_MEGATRON, hook_faults
    except ImportError as error:
        yield Finding(
            topic=topic, name="megatron-core", state="broken",
            found=f"{found}, but {error}", remedy="install what is missing, then run this again",
        )  # fmt: skip
        return
    is_tested = found in TESTED_MEGATRON
    yield Finding(
        topic=topic, name="megatron-core", state="ok" if is_tested else "broken",
        found=found if is_tested else f"{found}; tested is {', '.join(TESTED_MEGATRON)}",
        remedy="" if is_tested else f"pip install megatron-core=={TESTED_MEGATRON[-1]}",
    )  # fmt: skip
    faults = hook_faults()
    for target, fault in faults.items():
        if fault is not None:
            yield Finding(
                topic=topic, name=target.rpartition(":")[2], state="broken", found=fault,
                remedy=f"pip install megatron-core=={TESTED_MEGATRON[-1]}",
            )  # fmt: skip
    num_ok = sum(fault is None for fault in faults.values())
    yield Finding(
        topic=topic, name="hooks", state="ok" if num_ok == len(faults) else "broken",
        found=f"{num_ok} of {len(faults)} names are there with the signature that we know",
    )  # fmt: skip


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints one line for each finding, as a table if rich is there."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        for finding in findings:
            print(f"{finding.topic}: {finding.name}: {finding.state}: {finding.found}")
            if finding.remedy:
                print(f"    {finding.remedy}")
        return
    table = Table("", "state", "found", "what to do", title="megatron_splitkv on this machine",
                  title_justify="left")  # fmt: skip
    topic = None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_section()
            table.add_row(f"[bold]{topic}[/bold]")
        color = COLORS[finding.state]
        table.add_row(
            f"  {finding.name}", f"[{color}]{finding.state}[/{color}]", escape(finding.found),
            escape(finding.remedy),
        )  # fmt: skip
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_IN_A_FILE)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
