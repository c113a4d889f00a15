"""Every test of this folder runs with `torch.empty` filled with NaN, also inside the ops."""

import os
from collections.abc import Iterator

import pytest
import torch

import megatron_splitkv._kernels as _kernels

# What torch's deterministic mode, which fills `torch.empty`, asks of fp64 products on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def poisoned_empty() -> Iterator[None]:
    """Outputs and workspaces start as NaN: what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(7).isnan().all()
    assert torch.empty(28, dtype=torch.uint8).view(torch.float32).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def restored_isa() -> Iterator[None]:
    """Undoes `force_cpu_isa`."""
    yield
    _kernels.force_cpu_isa("auto")


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Undoes `torch.set_num_threads`."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def restored_family() -> Iterator[None]:
    """Undoes `force_cuda_family`."""
    yield
    _kernels.force_cuda_family("auto")


@pytest.fixture(params=["auto", "sm80"])
def family(request: pytest.FixtureRequest, restored_family: None) -> str:
    """Runs a test with the kernels of the device, then with those that every device runs."""
    _kernels.force_cuda_family(request.param)
    return request.param
