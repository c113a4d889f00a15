"""What a benchmark ran on, for the head of its report."""

import platform
import subprocess

import torch
from torch.cuda import nccl

import megatron_splitkv._kernels as _kernels


def describe_device(device: torch.device) -> dict[str, str]:
    """Name of the device, and the versions that its figures depend on."""
    about = {"torch": torch.__version__}
    if device.type == "cpu":
        isa = _kernels.current_cpu_isa()
        name = f"{platform.machine()}, {isa}, {torch.get_num_threads()} thread(s)"
        return {"device": name, **about}
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": _driver(),
        **about,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, nccl.version())),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def in_words(about: dict[str, str]) -> str:
    """One line."""
    return ", ".join(
        value if name == "device" else f"{name} {value}" for name, value in about.items()
    )
