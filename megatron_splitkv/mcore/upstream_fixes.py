"""Faults of megatron-core 0.19.2 that stand between a user and a run, each fixed by one hook.

Each entry says what breaks, where, and why the fix is safe. None changes the mathematics of a run
that already works.
"""

import contextlib
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from megatron_splitkv.mcore.arguments import is_packed
from megatron_splitkv.mcore.hooks import Replacement


def wheel_replacements() -> list[Replacement]:
    """Fixes that a pip-installed Megatron needs whatever the context-parallel implementation.

    `compile_helpers` runs `make` in the datasets folder at start. The wheel ships the built
    extension but no Makefile, so `make` fails and the process exits. Where the extension is there
    and the Makefile is not, there is nothing to compile.
    """
    spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if spec is None or spec.origin is None or (Path(spec.origin).parent / "Makefile").exists():
        return []
    return [
        Replacement(
            target="megatron.core.datasets.utils:compile_helpers",
            function=_already_compiled,
            signature=(),
        )
    ]


def packed_replacements() -> list[Replacement]:
    """Fixes for packed documents under pipeline parallelism."""
    return [
        Replacement(
            target="megatron.core.datasets.blended_megatron_dataset_builder"
            ":BlendedMegatronDatasetBuilder.__init__",
            function=_build_on_every_stage,
            signature=("self", "cls", "sizes", "is_built_on_rank", "config"),
            wraps=True,
        )
    ]


def gloo_replacements() -> list[Replacement]:
    """Fixes for GPUs over gloo, as when processes share one; see `is_gloo_on_gpus`.

    Megatron coalesces the reductions of its gradient buckets, and gloo coalesces tensors of the
    CPU only; one by one it takes those of a GPU. Each bucket is the sum that it was.
    """
    return [
        Replacement(
            target="megatron.core.distributed.param_and_grad_buffer:_coalescing_manager",
            function=_reduce_one_by_one,
            signature=("group", "device", "async_ops"),
            wraps=True,
        )
    ]


def is_gloo_on_gpus(args: Namespace) -> bool:
    """Whether the groups of a run reduce tensors of GPUs by gloo."""
    return args.distributed_backend == "gloo" and torch.cuda.is_available()


def allow_packed_microbatches(args: Namespace) -> None:
    """Lets several packed sequences of one microbatch pass between pipeline stages.

    A packed microbatch is flattened to `[1, b * s, h]`, but without variable lengths the stages
    agree on `[s, b, h]` and the second one fails. `validate_args` always clears the setting, so it
    is set afterwards. Every stage then sends its shape before its tensor.

    Args:
        args: validated arguments, changed in place.
    """
    if is_packed(args) and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        args.variable_seq_lengths = True
        if args.num_experts is None:  # the config's check of the dispatcher is for MoE models
            args.moe_token_dispatcher_type = "alltoall"


def _already_compiled() -> None:
    """Stands for `compile_helpers` where the built extension came with the wheel."""


def _reduce_one_by_one(
    original: Callable[..., AbstractContextManager[object]],
    group: object = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> AbstractContextManager[object]:
    """Coalesces nothing, so that each reduction runs where it is called.

    Overlapped ones are waited for by the handle of the coalesced call, and stay as they are.
    """
    return original(group, device, async_ops=True) if async_ops else contextlib.nullcontext()


def _build_on_every_stage(
    original: Callable[..., None],
    self: object,
    cls: type,
    sizes: list[int],
    is_built_on_rank: Callable[[], bool],
    config: Any,  # noqa: ANN401 - a dataset config of the script's choosing
) -> None:
    """Gives middle pipeline stages the dataset: they need the document lengths of each microbatch.

    The pretraining script builds it there only for SFT, and a middle stage then reads from None.
    Tensor-parallel ranks above 0 get the batch by broadcast, as before.
    """
    from megatron.core import parallel_state

    if getattr(config, "inter_document_masking", False):

        def first_tensor_rank() -> bool:
            return parallel_state.get_tensor_model_parallel_rank() == 0

        is_built_on_rank = first_tensor_rank
    original(self, cls, sizes, is_built_on_rank, config)
