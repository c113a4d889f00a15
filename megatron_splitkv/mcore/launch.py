"""The launcher: runs an unmodified Megatron training script with our context parallelism.

    torchrun --nproc-per-node 8 -m megatron_splitkv.launch pretrain_gpt.py \
        --context-parallel-impl splitkv --context-parallel-size 8 ...

Order of events: read `--context-parallel-impl` from the command line; without a GPU enter CPU mode;
add our arguments and checks to Megatron's parser; with `splitkv` put the hook table in force; run
the script as `__main__`; after the first training step fail if it did not use what was replaced.
"""

import argparse
import os
import runpy
import sys
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
    failure,
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
        failure.report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def main(argv: Sequence[str]) -> None:
    """Runs a training script under the launcher.

    Args:
        argv: the script's path, then its arguments.
    Raises:
        SystemExit: no script was named, or the script raised it, as Megatron does at
            `--exit-interval` and on signals.
        ValueError: the script is missing, or an argument of ours is wrong.
        UnsupportedError: this Megatron, this machine or a setting of the run does not fit, or the
            script's first training step did not use what was replaced.
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
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit:
            launcher.leave_groups()
            raise
        launcher.leave_groups()
        launcher.note_if_unchecked()
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
        self._is_checked = False
        self._installations: list[hooks.Installation] = []

    def install(self, script_args: Sequence[str]) -> None:
        """Enters CPU mode if there is no GPU, and puts the hooks of this implementation in force.

        Raises:
            UnsupportedError: Megatron is another version, a name to replace differs, or there are
                no kernels for this machine's GPU.
        """
        if self.impl == "splitkv":
            check_megatron_version(version("megatron-core"))
            arguments.check_command_line(script_args)
            check_device()
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
            self._installations.append(hooks.install([self._step_hook()]))

    def note_if_unchecked(self) -> None:
        """Says so where a script ended without a step of Megatron's: then nothing was checked."""
        args = self.args
        if self._session is None or args is None or args.skip_train or self._is_checked:
            return
        _print_on_first_rank(
            args,
            "splitkv: Megatron's train_step was not called, so whether this script uses Split-KV "
            "was not checked",
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

    def _step_hook(self) -> hooks.Replacement:
        return hooks.Replacement(
            target="megatron.training.training:train_step",
            function=self._train_step,
            signature=(
                "forward_step_func",
                "data_iterator",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "config",
                "forward_backward_func",
                "iteration",
                "pg_collection",
                "p2p_communicator",
            ),
            wraps=True,
        )

    def _train_step(
        self,
        original: Callable[..., Any],
        forward_step_func: Callable[..., Any],
        data_iterator: object,
        model: Sequence[torch.nn.Module],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Megatron's `train_step`; after the first one, what was replaced must have been used."""
        result = original(forward_step_func, data_iterator, model, *args, **kwargs)
        if not self._is_checked:
            self._is_checked = True
            self._check_use(model)
        return result

    def _check_use(self, model: Sequence[torch.nn.Module]) -> None:
        """Checks, after a step, that this rank called whatever it must.

        Raises:
            UnsupportedError: names what was not called.
        """
        from megatron_splitkv.mcore import hook_table

        assert self.args is not None and self._session is not None
        called = {name for item in self._installations for name, n in item.calls.items() if n}
        if self._session.num_attention_calls:
            called.add(hook_table.ATTENTION)
        missing = [x for x in hook_table.expected_calls(self.args, model) if x not in called]
        if missing:
            raise UnsupportedError(
                f"--context-parallel-impl splitkv: the first training step never called "
                f"{', '.join(missing)}, so this script does context parallelism its own way; let "
                "it call Megatron's functions and layer specs of those names, or run with "
                "--context-parallel-impl megatron"
            )

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
        else:
            arguments.check_stock_context_parallelism(args)
        original(args, defaults or {})
        if self.impl == "splitkv":
            upstream_fixes.allow_packed_microbatches(args)
            if upstream_fixes.is_gloo_on_gpus(args):
                self._installations.append(hooks.install(upstream_fixes.gloo_replacements()))
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


def check_device() -> None:
    """Refuses a GPU that there are no kernels for; without a GPU, CPU mode runs.

    Raises:
        UnsupportedError: CUDA is available and the ops have no CUDA implementation.
    """
    if torch.cuda.is_available() and not has_cuda_kernels():
        raise UnsupportedError(
            f"this machine has {torch.cuda.get_device_name()} and this build of megatron_splitkv "
            "has no CUDA kernels, which --context-parallel-impl splitkv needs on a GPU; set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU, or run with "
            "--context-parallel-impl megatron"
        )


def has_cuda_kernels() -> bool:
    """Whether this build holds the CUDA kernels of the attention."""
    from megatron_splitkv.ops import cuda

    return cuda.is_built()


def _print_on_first_rank(args: Namespace, line: str) -> None:
    if args.rank == 0:
        print(line, flush=True)


def _add_arguments(
    original: Callable[[ArgumentParser], ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Megatron's arguments and ours, whatever else the script adds."""
    return arguments.add_splitkv_args(original(parser))
