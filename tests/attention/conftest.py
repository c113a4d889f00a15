"""Every buffer of these tests starts as NaN, so that a value never written is seen."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """In deterministic mode torch fills what `empty` returns: NaN, in bytes all ones."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(was_deterministic)
