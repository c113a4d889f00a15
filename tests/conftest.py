"""Markers of the suite: without a GPU the default run still covers everything else."""

import os

import pytest
from hypothesis import settings

# CI tries the same examples each time; a developer's run searches on.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs one CUDA device")
    config.addinivalue_line("markers", "multi_gpu: needs two or more CUDA devices")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more GPUs than there are, and says so."""
    marked = [
        (item, name)
        for item in items
        for name in ("gpu", "multi_gpu")
        if item.get_closest_marker(name)
    ]
    if not marked:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    for item, name in marked:
        num_needed = 1 if name == "gpu" else 2
        if num_gpus < num_needed:
            reason = f"needs {num_needed} CUDA device(s), this machine has {num_gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))
