"""The launcher: runs an unmodified Megatron training script with our context parallelism.

    torchrun --nproc-per-node 8 -m megatron_splitkv.launch pretrain_gpt.py \
        --context-parallel-impl splitkv --context-parallel-size 8 ...

Order of events: read `--context-parallel-impl` from the command line; without a GPU enter CPU mode;
add our arguments and checks to Megatron's parser; with `splitkv` put the hook table in force; run
the script as `__main__`; at its end fail if a hook that applies to this run was never called.
"""

import argparse
import os
import runpy
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import (
    arguments,
    cpu_arguments,
    cpu_mode,
    hooks,
    upstream_fixes,
)

if TYPE_CHECKING:
    from megatron_splitkv.mcore.session import Session

TESTED_MEGATRON = ("0.19.2",)

_USAGE = (
    "usage: python -m megatron_splitkv.launch SCRIPT [arguments of SCRIPT]\n"
    "example: torchrun --nproc-per-node 2 -m megatron_splitkv.launch examples/pretrain_gpt.py "
    "--context-parallel-impl splitkv --context-parallel-size 2 ..."
)


def run() -> None:
    """Entry of `python -m megatron_splitkv.launch`: `main`, and a prompt end if it fails.

    A rank that fails leaves at once, without waiting in destructors for ranks that wait for it:
    its closed connections end the others, and torchrun stops what is left.
    """
    try:
        main(sys.argv[1:])
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        print(f"splitkv: rank {rank} of {size} failed: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def main(argv: Sequence[str]) -> None:
    """Runs a training script under the launcher.

    Args:
        argv: the script's path, then its arguments.
    Raises:
        SystemExit: no script was named.
        ValueError: the script is missing, or an argument of ours is wrong.
        UnsupportedError: this Megatron, or a setting of the run, does not fit.
        RuntimeError: the script ended and a hook that applies to the run was never called.
    """
    if not argv or argv[0] in ("-h", "--help"):
        raise SystemExit(_USAGE)
    script, script_args = argv[0], list(argv[1:])
    if not os.path.isfile(script):
        raise ValueError(f"script {script} does not exist; {_USAGE}")
    launcher = Launcher(arguments.requested_impl(script_args))
    try:
        launcher.install(script_args)
        sys.argv = [script, *script_args]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
        launcher.finish()
        launcher.leave_groups()
    finally:
        launcher.uninstall()


class Launcher:
    """What the launcher changed in this process, and the checks that belong to it."""

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.args: Namespace | None = None
        self._num_threads = 0
        self._session: Session | None = None
        self._num_hooks = 0
        self._installations: list[hooks.Installation] = []

    def install(self, script_args: Sequence[str]) -> None:
        """Enters CPU mode if there is no GPU, and puts the hooks of this implementation in force.

        Raises:
            UnsupportedError: Megatron is another version, or a name to replace differs.
        """
        if self.impl == "splitkv":
            check_megatron_version(version("megatron-core"))
            arguments.check_command_line(script_args)
        if cpu_mode.install():
            self._num_threads = cpu_arguments.share_cores()
        # What imports Megatron or native kernels is imported only now: CPU mode quiets the notices
        # of the first, and the second read the number of threads when they load.
        if self.impl == "splitkv" or cpu_mode.is_active():
            from megatron_splitkv.mcore import norm

            self._installations.append(hooks.install(norm.norm_replacements()))
        self._installations.append(hooks.install(self._argument_hooks()))
        self._installations.append(hooks.install(upstream_fixes.wheel_replacements()))
        if self.impl == "splitkv":
            from megatron_splitkv.mcore import hook_table, session

            self._session = session.Session()
            table = hook_table.splitkv_replacements(self._session)
            self._num_hooks = len(table)
            self._installations.append(hooks.install(table))
            self._installations.append(hooks.install(upstream_fixes.packed_replacements()))

    def finish(self) -> None:
        """Checks, after the script, that what was replaced was used.

        Raises:
            RuntimeError: a hook that applies to this run was never called.
        """
        if self.impl != "splitkv" or self.args is None or self.args.skip_train:
            return
        from megatron_splitkv.mcore import hook_table

        called = {name for item in self._installations for name, n in item.calls.items() if n}
        missing = [name for name in hook_table.expected_calls(self.args) if name not in called]
        if missing:
            raise RuntimeError(
                f"--context-parallel-impl splitkv: {', '.join(missing)} was replaced and never "
                "called, so the run did not use it; call Megatron's function of that name in the "
                "script, or run with --context-parallel-impl megatron"
            )

    def leave_groups(self) -> None:
        """Ends the process groups of a script that did not.

        Left to the interpreter's exit, their threads now and then abort a run that succeeded.
        """
        if self._session is not None:
            self._session.forget_plans()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def uninstall(self) -> None:
        """Puts back what `install` changed, last first."""
        while self._installations:
            self._installations.pop().uninstall()
        cpu_mode.uninstall()

    def _argument_hooks(self) -> list[hooks.Replacement]:
        return [
            hooks.Replacement(
                target="megatron.training.arguments:add_megatron_arguments",
                function=_add_arguments,
                signature=("parser",),
                wraps=True,
            ),
            hooks.Replacement(
                target="megatron.training.arguments:validate_args",
                function=self._validate,
                signature=("args", "defaults"),
                wraps=True,
            ),
        ]

    def _validate(
        self,
        original: Callable[..., Any],
        args: Namespace,
        defaults: dict[str, Any] | None = None,
    ) -> Namespace:
        """Megatron's `validate_args` between our settings and checks, and what must come after."""
        if cpu_mode.is_active():
            changed = cpu_arguments.apply_cpu_settings(args)
            line = cpu_arguments.cpu_mode_line(
                changed, num_processes=args.world_size, num_threads=self._num_threads
            )
            _print_on_first_rank(args, line)
        if self.impl == "splitkv":
            for note in arguments.validate_splitkv_args(args):
                _print_on_first_rank(args, f"splitkv: {note}")
        original(args, defaults or {})
        if self.impl == "splitkv":
            upstream_fixes.allow_packed_microbatches(args)
        if self._session is not None:
            self._session.configure(args, num_hooks=self._num_hooks)
        self.args = args
        return args


def check_megatron_version(found: str) -> None:
    """Refuses a Megatron whose functions we have not seen.

    Raises:
        UnsupportedError: `found` is not one of `TESTED_MEGATRON`.
    """
    if found not in TESTED_MEGATRON:
        raise UnsupportedError(
            f"megatron-core {found} is installed; --context-parallel-impl splitkv is tested with "
            f"{', '.join(TESTED_MEGATRON)}; pip install megatron-core=={TESTED_MEGATRON[-1]}, or "
            "run with --context-parallel-impl megatron"
        )


def _print_on_first_rank(args: Namespace, line: str) -> None:
    if args.rank == 0:
        print(line, flush=True)


def _add_arguments(
    original: Callable[[ArgumentParser], ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Megatron's arguments and ours, whatever else the script adds."""
    return arguments.add_splitkv_args(original(parser))
