"""Transports, all against the same hand-made answer, and which of them a group gives."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import (
    HostStagedTransport,
    ProcessGroupTransport,
    ThreadGroup,
    transport_of,
)
from tests.gloo import run_gloo
from tests.transports import check_exchange, exchange_body, on_gloo, rank_and_size


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_thread_transport(size, seed):
    group = ThreadGroup(size)
    results = group.run(lambda transport: exchange_body(transport, seed, 16))
    check_exchange(size, seed, 16, results)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo_transport(size):
    for seed in range(3):
        check_exchange(size, seed, 48, run_gloo(size, on_gloo, exchange_body, seed, 48))


def test_ranks_of_both_transports():
    assert ThreadGroup(3).run(rank_and_size) == [(0, 3), (1, 3), (2, 3)]
    assert run_gloo(3, on_gloo, rank_and_size) == [(0, 3), (1, 3), (2, 3)]


def subgroup_body() -> tuple[int, int, list[int]]:
    """Ranks of a group are counted inside it, not in the world."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    transport = ProcessGroupTransport(group=groups[dist.get_rank() % 2])
    me = torch.tensor([[dist.get_rank()]], dtype=torch.uint8)
    everyone = transport.all_gather(me).wait().flatten().tolist()
    return transport.rank, transport.size, everyone


def test_a_subgroup_has_its_own_ranks():
    assert run_gloo(4, subgroup_body) == [
        (0, 2, [0, 2]),
        (0, 2, [1, 3]),
        (1, 2, [0, 2]),
        (1, 2, [1, 3]),
    ]


# Which transport a group gives.


def chosen_on_gloo(device: str, choice: str) -> str:
    """The transport of the world, or why there is none."""
    try:
        return type(transport_of(dist.group.WORLD, torch.device(device), choice)).__name__
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("choice", ["auto", "gloo"])
def test_gloo_carries_tensors_of_the_cpu(choice):
    assert run_gloo(2, chosen_on_gloo, "cpu", choice) == ["ProcessGroupTransport"] * 2


def test_a_group_of_one_needs_no_transport():
    assert run_gloo(1, chosen_on_gloo, "cpu", "auto") == ["NoneType"]


def test_gloo_is_not_taken_for_a_gpu_in_silence():
    for message in run_gloo(2, chosen_on_gloo, "cuda", "auto"):
        assert "communicates by gloo, but its tensors are on a GPU" in message
        assert "--distributed-backend nccl, or --splitkv-transport gloo" in message


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nccl_is_not_replaced_in_silence(device):
    for message in run_gloo(2, chosen_on_gloo, device, "nccl"):
        assert "transport='nccl' needs a process group with that backend, got gloo for" in message
        assert f"tensors on {device}; give --distributed-backend nccl" in message


class Pinned:
    """Rows that say they are pinned, and what is asked of their kind."""

    shape = (4, 16)

    def __init__(self):
        self.asked = []

    def __len__(self):
        return self.shape[0]

    def is_pinned(self):
        return True

    def new_empty(self, *shape, pin_memory):
        self.asked.append((shape, pin_memory))
        return torch.empty(shape, dtype=torch.uint8)


def pinned_body() -> list[tuple[tuple[int, int], bool]]:
    """What both collectives ask for when given pinned rows; nothing is sent."""
    rows, transport = Pinned(), ProcessGroupTransport(group=dist.group.WORLD)
    with (
        mock.patch.object(dist, "all_to_all_single", return_value=None),
        mock.patch.object(dist, "all_gather_into_tensor", return_value=None),
    ):
        transport.exchange(rows, np.array([[1, 3], [8, 6]]))
        transport.all_gather(rows)
    return rows.asked


def test_pinned_rows_are_received_as_pinned():
    """The copy to the GPU behind them does not wait, so the allocator must know their memory."""
    assert run_gloo(2, pinned_body) == [[((9, 16), True), ((8, 16), True)]] * 2


def chosen_of_both() -> list[str]:
    """What a group with a backend for each device gives, on the CPU."""
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        wanted = [("cpu", "auto"), ("cpu", "gloo"), ("cuda", "nccl")]
        return [chosen_on_gloo(*each) for each in wanted]


def test_a_group_with_a_backend_for_each_device():
    assert run_gloo(2, chosen_of_both) == [["ProcessGroupTransport"] * 3] * 2


# One GPU: simulated ranks on streams of their own, and processes that stage through the host.


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_thread_transport_on_streams(size, seed):
    group = ThreadGroup(size, device="cuda")
    results = group.run(lambda transport: exchange_body(transport, seed, 16, "cuda"))
    check_exchange(size, seed, 16, results)


def staged(seed: int, row_bytes: int) -> list[torch.Tensor]:
    transport = transport_of(dist.group.WORLD, torch.device("cuda"), "gloo")
    assert isinstance(transport, HostStagedTransport)
    return exchange_body(transport, seed, row_bytes, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_staged_transport_of_processes_on_one_gpu(size):
    for seed in range(3):
        check_exchange(size, seed, 48, run_gloo(size, staged, seed, 48))
