"""CUDA calls answered by the CPU, and everything put back afterwards."""

import os
import warnings

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as mcore_random
from megatron.training import initialize

from megatron_splitkv.mcore import cpu_mode

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode never activates where CUDA is available"
)


@pytest.fixture
def cpu():
    assert cpu_mode.install()
    yield
    cpu_mode.uninstall()


@pytest.fixture
def tracker(cpu):
    """Megatron's random-number tracker, seeded; needs no process group."""
    tensor_parallel.model_parallel_cuda_manual_seed(
        7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True
    )
    return tensor_parallel.get_cuda_rng_tracker()


def test_devices_become_the_cpu(cpu):
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.arange(2, device=torch.device("cuda", 1)).device.type == "cpu"
    assert torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(2, device="cpu", pin_memory=True).is_pinned() is False
    x = torch.ones(2)
    for moved in (x.cuda(), x.cuda(0, non_blocking=True), x.to("cuda:0"), x.to(device="cuda")):
        assert moved.data_ptr() == x.data_ptr()
    assert x.to("cuda", torch.bfloat16).dtype == torch.bfloat16
    assert x.pin_memory() is x
    assert torch.nn.Linear(2, 2, device="cuda").cuda().weight.device.type == "cpu"


def test_type_names_are_those_of_a_gpu(cpu):
    """Megatron's optimizers compare these strings."""
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32


def test_streams_and_events_are_in_order(cpu):
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(4)
        x.record_stream(stream)
    stream.wait_stream(torch.cuda.current_stream())
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.memory_allocated() > 0
    assert torch.cuda.device_count() == 1


def test_installing_twice_is_installing_once():
    assert cpu_mode.install()
    assert cpu_mode.install()
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor", "not torch.cuda.cuda"
    cpu_mode.uninstall()
    assert not cpu_mode.is_active()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def quieted():
    """Whether notices about missing GPU packages are filtered out."""
    return any(entry[1] and "Apex" in entry[1].pattern for entry in warnings.filters)


def test_uninstall_restores_everything(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    names = ("current_device", "Stream", "device_count", "get_rng_state", "memory_allocated")
    before = [getattr(torch.cuda, name) for name in names]
    megatron = (mcore_random._get_cuda_rng_state, initialize.initialize_megatron)
    cpu_mode.install()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert quieted()
    cpu_mode.uninstall()
    assert [getattr(torch.cuda, name) for name in names] == before
    assert (mcore_random._get_cuda_rng_state, initialize.initialize_megatron) == megatron
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert not quieted()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_stays_off_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    assert not cpu_mode.install()
    assert not cpu_mode.is_active()
    assert torch.cuda.current_device is before


def test_fork_draws_apart_from_the_default_state(tracker):
    state = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state), "the default state is untouched"
    with tracker.fork():
        second = torch.rand(3)
    assert not torch.equal(first, second), "the forked state goes on"


def test_recomputation_repeats_dropout(tracker):
    """Dropout inside and outside a fork gives, recomputed, the gradient of the same masks."""

    def block(x):
        x = torch.nn.functional.dropout(x * 3, 0.5)
        with tracker.fork():
            return torch.nn.functional.dropout(x * x, 0.5)

    def gradient(recompute):
        torch.manual_seed(3)
        tracker.set_states({name: s.clone() for name, s in states.items()})
        x = torch.arange(1.0, 65.0, requires_grad=True)
        y = tensor_parallel.checkpoint(block, False, x) if recompute else block(x)
        torch.rand(5)  # what comes after the block moves the states on
        with tracker.fork():
            torch.rand(5)
        y.sum().backward()
        return y.detach(), x.grad

    states = {name: state.clone() for name, state in tracker.get_states().items()}
    (kept, kept_grad), (again, again_grad) = gradient(False), gradient(True)
    assert 0 < (kept == 0).sum() < 64
    assert torch.equal(kept, again)
    assert torch.equal(kept_grad, again_grad)


def test_warm_up_draws_no_random_numbers(cpu):
    """Its shapes depend on the context-parallel size, and so would all weights made after it."""
    state = torch.get_rng_state()
    initialize._warmup_jit_function(tp_size=1)
    assert torch.equal(torch.get_rng_state(), state)
