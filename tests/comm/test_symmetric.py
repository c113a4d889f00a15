"""Rows pulled by copy engines: two GPUs of one host against known answers, refusals anywhere."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import SymmetricTransport, process_group, symmetric, transport_of
from megatron_splitkv.comm.symmetric import places_of
from tests.gloo import run_gloo
from tests.transports import check_exchange, counts_between, exchange_body, rows_between


def refusal(device: str) -> str:
    with pytest.raises(ValueError, match="transport='symmetric'") as error:
        transport_of(dist.group.WORLD, torch.device(device), "symmetric")
    return str(error.value)


def test_the_cpu_is_refused():
    for text in run_gloo(2, refusal, "cpu"):
        assert "moves rows between GPUs, but the tensors are on cpu" in text
        assert "take transport auto" in text


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_refused():
    for text in run_gloo(2, refusal, "cuda:0"):
        assert "it needs a GPU for each context-parallel rank, got 1 for 2" in text


def reason_on(hosts: list[str], has_access: bool) -> str | None:
    """What a GPU for each rank of a group gives, on these hosts."""
    rank = dist.get_rank()
    with (
        mock.patch.object(symmetric, "_host", return_value=("node", hosts[rank])),
        mock.patch.object(symmetric, "_uuid", side_effect=lambda index: f"GPU {index}"),
        mock.patch("torch.cuda.device_count", return_value=2),
        mock.patch("torch.cuda.can_device_access_peer", return_value=has_access or rank == 0),
    ):
        return symmetric.reason_against(dist.group.WORLD, torch.device("cuda", rank))


def test_other_hosts_and_gpus_that_cannot_be_read_are_refused_on_every_rank():
    assert run_gloo(2, reason_on, ["a", "a"], True) == [None] * 2
    for text in run_gloo(2, reason_on, ["a", "b"], True):
        assert text == "it needs all context-parallel ranks on one host, got 2: node"
    for text in run_gloo(2, reason_on, ["a", "a"], False):
        assert text == "ranks [1] cannot read the memory of all the others' GPUs"


def reason_with_hidden_gpus() -> str | None:
    """What processes give that see but their own GPU, each as number 0."""
    mine = f"GPU {dist.get_rank()}"
    with mock.patch.object(symmetric, "_uuid", return_value=mine):
        return symmetric.reason_against(dist.group.WORLD, torch.device("cuda", 0))


def test_hidden_gpus_are_refused():
    for text in run_gloo(2, reason_with_hidden_gpus):
        assert "theirs are numbered [0, 0]; do not hide GPUs by CUDA_VISIBLE_DEVICES" in text


def is_symmetric_by_default(reason: str | None) -> bool:
    """What a group of NCCL gives when nothing is asked for."""
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(process_group, "reason_against", return_value=reason),
        mock.patch.object(process_group, "SymmetricTransport") as made,
    ):
        return transport_of(dist.group.WORLD, torch.device("cuda", 0)) is made.return_value


def test_memory_is_read_by_default_where_it_can_be():
    assert run_gloo(2, is_symmetric_by_default, None) == [True, True]
    assert run_gloo(2, is_symmetric_by_default, "two hosts") == [False, False]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_rank_finds_its_rows_in_what_the_others_show(size):
    counts = counts_between(size, seed=size).numpy()
    shown = [
        torch.cat([rows_between(source, to, int(counts[source, to]), 16) for to in range(size)])
        for source in range(size)
    ]
    for rank in range(size):
        places = places_of(counts, rank, row_bytes=16)
        assert places.size == max(rows.numel() for rows in shown)
        due_readers = {peer for peer in range(size) if peer != rank and counts[rank, peer]}
        assert {*places.readers} == due_readers
        for source, (begin, num_bytes) in enumerate(zip(places.begins, places.coming, strict=True)):
            due = rows_between(source, rank, int(counts[source, rank]), 16).flatten()
            assert torch.equal(shown[source].flatten()[begin : begin + num_bytes], due)


def my_device() -> torch.device:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def known_body(seed: int, row_bytes: int) -> list[torch.Tensor]:
    device = my_device()
    transport = SymmetricTransport(dist.group.WORLD, device)
    return exchange_body(transport, seed, row_bytes, str(device))


@pytest.mark.multi_gpu
def test_symmetric_transport():
    for seed in range(3):
        check_exchange(2, seed, 48, run_gloo(2, known_body, seed, 48))


def racing_body(num_calls: int) -> int:
    """Collectives of random sizes with pauses of either rank; returns how many came out wrong."""
    device, rank = my_device(), dist.get_rank()
    transport = SymmetricTransport(dist.group.WORLD, device)
    pauses = np.random.default_rng(rank)
    together = np.random.default_rng(7)
    wrong, pending = [], []
    nothing = transport.send_buffer(np.zeros((2, 2), dtype=np.int64), 64, device)
    assert transport.exchange(nothing, np.zeros((2, 2), dtype=np.int64)).wait().shape == (0, 64)
    for call in range(num_calls):
        largest = 1 << int(together.integers(1, 19))  # grows the buffers now and then
        counts = together.integers(0, largest, (2, 2))
        value = 100 * rank + call % 100
        torch.cuda._sleep(int(pauses.integers(0, 2_000_000)))
        rows = torch.empty(int(counts[rank].sum()), 64, dtype=torch.uint8, device=device)
        if call % 2:
            rows = transport.send_buffer(counts, 64, device)
        rows.fill_(value)
        pending.append((call, transport.exchange(rows, counts), counts[:, rank]))
        del rows  # what it held is free for others at once
        while len(pending) > (2 if call < num_calls - 1 else 0):
            number, arriving, coming = pending.pop(0)
            received = arriving.wait().split(coming.tolist())
            for source, part in enumerate(received):
                wrong.append((part != 100 * source + number % 100).any())
            del arriving, received
    return int(torch.stack(wrong).sum())


@pytest.mark.multi_gpu
def test_ranks_that_stall_read_nothing_too_early_and_overwrite_nothing():
    assert run_gloo(2, racing_body, 300) == [0, 0]
