"""What a GPU command line means in CPU mode: settings that change, and settings refused.

A command written for GPUs runs unchanged. Settings that only choose a faster GPU form of the same
mathematics are switched, and named in one line. Settings that change the numbers or the memory
layout, and have no CPU form, are refused.
"""

import os
from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_splitkv.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class CpuSetting:
    """One Megatron argument that CPU mode sets.

    Attributes:
        name: attribute of the parsed arguments.
        value: what CPU mode needs.
        flag: the command line that has the same effect, for the message.
    """

    name: str
    value: object
    flag: str


CPU_SETTINGS = (
    CpuSetting("distributed_backend", "gloo", "--distributed-backend gloo"),
    CpuSetting("transformer_impl", "local", "--transformer-impl local"),
    CpuSetting("use_cpu_initialization", True, "--use-cpu-initialization"),
    CpuSetting("no_persist_layer_norm", True, "--no-persist-layer-norm"),
    CpuSetting("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    CpuSetting("masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
    CpuSetting("bias_gelu_fusion", False, "--no-bias-gelu-fusion"),
    CpuSetting("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion"),
    CpuSetting("bias_dropout_fusion", False, "--no-bias-dropout-fusion"),
    CpuSetting("apply_rope_fusion", False, "--no-rope-fusion"),
    CpuSetting("moe_grouped_gemm", False, "no --moe-grouped-gemm"),
    CpuSetting("moe_permute_fusion", False, "no --moe-permute-fusion"),
    CpuSetting("moe_router_fusion", False, "no --moe-router-fusion"),
    CpuSetting("tp_comm_overlap", False, "no --tp-comm-overlap"),
    CpuSetting("te_rng_tracker", False, "no --te-rng-tracker"),
)

# Attribute, the values that are fine, and the flag to name.
_NEEDS_GPU: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("fp8", (None, False), "--fp8-format"),
    ("fp4", (None, False), "--fp4-format"),
    ("cuda_graph_impl", ("none", None), "--cuda-graph-impl"),
    ("enable_cuda_graph", (False,), "--enable-cuda-graph"),
    ("external_cuda_graph", (False,), "--external-cuda-graph"),
    ("optimizer_cuda_graph", (False,), "--optimizer-cuda-graph"),
    ("use_megatron_fsdp", (False,), "--use-megatron-fsdp"),
    ("use_torch_fsdp2", (False,), "--use-torch-fsdp2"),
    ("optimizer_cpu_offload", (False,), "--optimizer-cpu-offload"),
    ("fine_grained_activation_offloading", (False,), "--fine-grained-activation-offloading"),
    ("use_precision_aware_optimizer", (False,), "--use-precision-aware-optimizer"),
    ("batch_invariant_mode", (False,), "--batch-invariant-mode"),
    ("moe_token_dispatcher_type", ("alltoall", "allgather"), "--moe-token-dispatcher-type"),
    ("high_priority_stream_groups", ([], None), "--high-priority-stream-groups"),
)


def apply_cpu_settings(args: Namespace) -> list[str]:
    """Sets what CPU mode needs on freshly parsed Megatron arguments.

    Args:
        args: parsed, not yet validated; changed in place.
    Returns:
        The flags that were not given and are now in effect, in the order of `CPU_SETTINGS`.
    Raises:
        UnsupportedError: a given setting has no CPU form.
    """
    for name, fine, flag in _NEEDS_GPU:
        value = getattr(args, name, fine[0])
        if value not in fine:
            raise UnsupportedError(
                f"{flag}={value} needs a GPU and no CUDA device was found; leave the flag out, or "
                "run where torch.cuda.is_available() is true"
            )
    changed = []
    for setting in CPU_SETTINGS:
        if getattr(args, setting.name) != setting.value:
            setattr(args, setting.name, setting.value)
            changed.append(setting.flag)
    return changed


def cpu_mode_line(changed: list[str], *, num_processes: int, num_threads: int) -> str:
    """The line that says that no GPU is used, and what follows from it."""
    settings = f"; set for this: {', '.join(changed)}" if changed else ""
    return (
        f"splitkv: CPU MODE, no CUDA device was found: training with {num_processes} gloo "
        f"process{'es' if num_processes != 1 else ''} x {num_threads} "
        f"thread{'s' if num_threads != 1 else ''} per process{settings}"
    )


def share_cores() -> int:
    """Gives each process of this machine its share of the cores, for torch and for OpenMP.

    A smaller OMP_NUM_THREADS is kept, except 1: torchrun sets that whatever the machine has. Call
    it before native kernels are loaded, because OpenMP reads the variable once.

    Returns:
        Threads of this process, at least 1.
    """
    num_threads = max(1, _num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 1:
        num_threads = min(num_threads, int(chosen))
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)
    return num_threads


def _num_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no quota that we can read
    return cores
