"""Exchanges with a known answer, for every transport."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_splitkv.comm import ProcessGroupTransport, Transport


def counts_between(size: int, seed: int) -> torch.Tensor:
    """Rows from each rank to each rank, uneven and with many zeros, `[size, size]`."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (size, size), generator=generator)
    return counts * (torch.rand(size, size, generator=generator) < 0.6)


def rows_between(source: int, destination: int, count: int, row_bytes: int) -> torch.Tensor:
    values = torch.arange(count * row_bytes) + 31 * source + 7 * destination
    return (values % 251).to(torch.uint8).view(count, row_bytes)


def exchange_body(
    transport: Transport, seed: int, row_bytes: int, device: str = "cpu"
) -> list[torch.Tensor]:
    """Two exchanges in flight at once, then an all_gather; what arrived."""
    size, rank = transport.size, transport.rank
    pending = []
    for step in range(2):
        counts = counts_between(size, seed + step)
        outgoing = torch.cat(
            [rows_between(rank, peer, int(counts[rank, peer]), row_bytes) for peer in range(size)]
        )
        pending.append(transport.exchange(outgoing.to(device), counts.numpy()))
    mine = rows_between(rank, 0, seed % 3, row_bytes).to(device)
    pending.append(transport.all_gather(mine))
    return [item.wait().cpu() for item in pending]


def check_exchange(size: int, seed: int, row_bytes: int, results: list[list[torch.Tensor]]) -> None:
    for rank, result in enumerate(results):
        for step in range(2):
            counts = counts_between(size, seed + step)
            expected = [
                rows_between(peer, rank, int(counts[peer, rank]), row_bytes) for peer in range(size)
            ]
            assert torch.equal(result[step], torch.cat(expected))
        everyone = [rows_between(peer, 0, seed % 3, row_bytes) for peer in range(size)]
        assert torch.equal(result[2], torch.stack(everyone))


def on_gloo(body: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a body that takes a transport, on the world group."""
    return body(ProcessGroupTransport(group=dist.group.WORLD), *arguments)


def rank_and_size(transport: Transport) -> tuple[int, int]:
    """What a transport says of itself."""
    return transport.rank, transport.size
