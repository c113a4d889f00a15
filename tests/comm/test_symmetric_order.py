"""The order of what `SymmetricTransport` gives to its streams, in a model of the GPUs.

The transport runs for every rank on the CPU, with streams that write down what they get. Then the
ranks work it off in random order, once with a queue for each stream, and once with one queue for
all streams of a GPU, as with CUDA_DEVICE_MAX_CONNECTIONS=1. None may be left waiting, and no rank
may pull bytes of any other collective than its own.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_splitkv.comm import SymmetricTransport, symmetric

NUM_COLLECTIVES = 40
UNDEFINED = -1  # bytes that are being written


class Op(NamedTuple):
    """What a stream was given.

    Attributes:
        stream: index of it.
        is_ready: whether it can be worked off now.
        run: works it off.
    """

    stream: int
    is_ready: Callable[["Host"], bool]
    run: Callable[["Host"], None]


@dataclass
class Gpu:
    """The queue of a rank, in the order in which it was filled."""

    ops: list[Op] = field(default_factory=list)
    given: list[int] = field(default_factory=lambda: [0, 0])  # to each stream
    done: list[int] = field(default_factory=lambda: [0, 0])  # by each stream

    def give(
        self,
        stream: int,
        run: Callable[["Host"], None],
        is_ready: Callable[["Host"], bool] = lambda _: True,
    ) -> None:
        """Fills the queue of a stream."""
        self.ops.append(Op(stream, is_ready, run))
        self.given[stream] += 1


@dataclass
class Host:
    """GPUs that have each other's memory mapped.

    Attributes:
        gpus: of the ranks.
        flags: by address.
        mapped: buffers of all ranks, in the order of their making.
        stamps: for each byte of a buffer, the collective whose rows lie there.
    """

    gpus: list[Gpu]
    flags: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    mapped: list[list[Tensor]] = field(default_factory=list)
    stamps: dict[int, np.ndarray] = field(default_factory=dict)

    def stamps_at(self, address: int, num_bytes: int) -> np.ndarray | None:
        """Of these bytes; None outside all buffers."""
        for buffer in (buffer for of_ranks in self.mapped for buffer in of_ranks):
            begin = address - buffer.data_ptr()
            if 0 <= begin < buffer.numel():
                stamps = self.stamps.setdefault(
                    buffer.data_ptr(), np.zeros(buffer.numel(), dtype=np.int64)
                )
                return stamps[begin : begin + num_bytes]
        return None


class Stream:
    """Stands for one of torch's."""

    def __init__(self, gpu: Gpu, index: int) -> None:
        self.gpu, self.cuda_stream = gpu, index

    def record_event(self) -> tuple[int, int]:
        return self.cuda_stream, self.gpu.given[self.cuda_stream]

    def wait_event(self, event: tuple[int, int]) -> None:
        gpu, (other, position) = self.gpu, event
        self.gpu.give(self.cuda_stream, lambda _: None, lambda _: gpu.done[other] >= position)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class ModelTransport(SymmetricTransport):
    """Of one rank of the model; `_at` is where rows are packed."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host, self._num_mapped = host, 0
        self.gpu = host.gpus[rank]
        streams = [Stream(self.gpu, 0), Stream(self.gpu, 1)]
        group = SimpleNamespace(rank=lambda: rank, size=lambda: len(host.gpus))
        with (
            mock.patch("torch.cuda.current_stream", return_value=streams[0]),
            mock.patch("torch.cuda.Stream", return_value=streams[1]),
            mock.patch("torch.cuda.synchronize"),
            mock.patch.object(symmetric.dist, "barrier"),
            mock.patch.object(symmetric, "_host_word", return_value=torch.zeros(1).int()),
            mock.patch.object(symmetric, "_timeout_s", return_value=1e9),
        ):
            super().__init__(group, torch.device("cuda", rank))
        self._watchdog = mock.Mock()

    def _mapped(self, num_bytes: int) -> symmetric._Mapped:
        if self._num_mapped == len(self._host.mapped):
            size = len(self._host.gpus)
            self._host.mapped.append([torch.zeros(num_bytes).byte() for _ in range(size)])
        of = self._host.mapped[self._num_mapped]
        assert {len(buffer) for buffer in of} == {num_bytes}, "ranks disagree"
        self._num_mapped += 1
        return symmetric._Mapped(of=of, handle=None)

    def _current_stream(self) -> Stream:
        return self._caller

    def _at(self, place: symmetric._Place, num_rows: int, row_bytes: int) -> Tensor:
        rows, num_bytes = super()._at(place, num_rows, row_bytes), num_rows * row_bytes
        for stamp in (UNDEFINED, place.number):  # packing takes its time

            def run(host: Host, stamp: int = stamp) -> None:
                host.stamps_at(rows.data_ptr(), num_bytes)[:] = stamp

            if num_bytes:
                self.gpu.give(0, run)
        return rows


def write_flag(stream: Stream, address: int, value: int) -> None:
    stream.gpu.give(stream.cuda_stream, lambda host: host.flags.update({address: value}))


def wait_for_flag(stream: Stream, address: int, value: int) -> None:
    stream.gpu.give(stream.cuda_stream, lambda _: None, lambda host: host.flags[address] >= value)


def copying(transport: ModelTransport) -> Callable[[Stream, int, int, int], None]:
    """`copy_bytes` of a rank: its bytes must be those of the collective, first and last."""

    def copy_bytes(stream: Stream, target: int, source: int, num_bytes: int) -> None:
        number = transport._number

        def run(host: Host) -> None:
            stamps = host.stamps_at(source, num_bytes)
            assert stamps is None or (stamps == number).all(), f"{number} pulled {set(stamps)}"

        for _ in range(2):
            stream.gpu.give(stream.cuda_stream, run)

    return copy_bytes


def program(transport: ModelTransport, seed: int) -> None:
    """Random collectives, the same on all ranks, at most two of them in flight."""
    draw = np.random.default_rng(seed)
    size, pending = transport.size, []
    for _ in range(NUM_COLLECTIVES):
        kind, largest = draw.integers(0, 3), int(draw.choice([2, 6, 20, 60]))
        counts = draw.integers(0, largest, (size, size)) * (draw.random((size, size)) < 0.7)
        rows = torch.zeros(int(counts[transport.rank].sum()), 16, dtype=torch.uint8)
        if kind == 0:
            pending.append(transport.all_gather(rows[:0].new_zeros(int(counts.max()), 16)))
        else:
            if kind == 1:
                rows = transport.send_buffer(counts, 16, torch.device("cuda", transport.rank))
            pending.append(transport.exchange(rows, counts))
        if len(pending) > 2:
            pending.pop(0).wait()
    for last in pending:
        last.wait()


def recorded(size: int, seed: int) -> Host:
    """What the streams of all ranks were given."""
    host = Host([Gpu() for _ in range(size)])
    with (
        mock.patch.object(symmetric, "FIRST_BYTES", 2048),
        mock.patch.object(symmetric, "write_flag", write_flag),
        mock.patch.object(symmetric, "wait_for_flag", wait_for_flag),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        for rank in range(size):
            transport = ModelTransport(host, rank)
            with mock.patch.object(symmetric, "copy_bytes", copying(transport)):
                program(transport, seed)
    return host


def heads_of(gpu: Gpu, has_one_queue: bool) -> Iterator[int]:
    """Indices of what may come next: the oldest op, of all or of each stream."""
    seen: set[int] = set()
    for index, op in enumerate(gpu.ops):
        if op.stream not in seen:
            seen.add(op.stream)
            yield index
        if has_one_queue or len(seen) == 2:
            return


def work_off(host: Host, has_one_queue: bool, draw: random.Random) -> None:
    """Runs everything, in random order among the ranks and their queues."""
    while any(gpu.ops for gpu in host.gpus):
        ready = [
            (gpu, index)
            for gpu in host.gpus
            for index in heads_of(gpu, has_one_queue)
            if gpu.ops[index].is_ready(host)
        ]
        assert ready, f"ranks wait for each other: {[len(gpu.ops) for gpu in host.gpus]} ops left"
        gpu, index = draw.choice(ready)
        for _ in range(draw.choice([1, 1, 30])):  # now and then a rank runs ahead
            op = gpu.ops.pop(index)
            op.run(host)
            gpu.done[op.stream] += 1
            following = [i for i in heads_of(gpu, has_one_queue) if gpu.ops[i].is_ready(host)]
            if not following:
                break
            index = draw.choice(following)


@pytest.mark.parametrize("has_one_queue", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_is_left_waiting_or_pulls_what_was_not_shown(size, seed, has_one_queue):
    host = recorded(size, seed)
    assert len(host.mapped) > 2, "buffers grow"
    work_off(host, has_one_queue, random.Random(seed))
