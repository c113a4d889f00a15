"""One rank fails, stalls or disagrees: the others end too, with its error or within the timeout."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.comm import ProcessGroupTransport, ThreadGroup, Transport
from tests.gloo import GlooError, run_gloo, run_outcomes
from tests.transports import check_exchange, exchange_body, on_gloo, rank_and_size

ONE_EACH = np.ones((3, 3), dtype=np.int64)


def test_a_raising_thread_rank_releases_the_others():
    released = []

    def body(transport: Transport) -> None:
        if transport.rank == 1:
            raise ValueError("document 3 is broken")
        try:
            transport.exchange(
                torch.zeros(0, 16, dtype=torch.uint8), np.zeros((3, 3), dtype=np.int64)
            ).wait()
        except threading.BrokenBarrierError:
            released.append(transport.rank)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="document 3 is broken"):
        ThreadGroup(3, timeout_s=30.0).run(body)
    assert sorted(released) == [0, 2]
    assert time.monotonic() - start < 10.0


def test_a_group_of_threads_works_again_after_an_error():
    group = ThreadGroup(3, timeout_s=30.0)

    def body(transport: Transport) -> None:
        transport.exchange(torch.zeros(3, 16, dtype=torch.uint8), ONE_EACH).wait()
        if transport.rank == 2:
            raise ValueError("document 3 is broken")
        transport.all_gather(torch.zeros(1, 16, dtype=torch.uint8)).wait()

    for _ in range(2):
        with pytest.raises(ValueError, match="document 3 is broken"):
            group.run(body)
    check_exchange(3, 1, 16, group.run(lambda transport: exchange_body(transport, 1, 16)))


def test_a_missing_thread_rank_is_a_timeout():
    def body(transport: Transport) -> None:
        if transport.rank != 1:
            transport.all_gather(torch.zeros(1, 16, dtype=torch.uint8)).wait()

    with pytest.raises(threading.BrokenBarrierError):
        ThreadGroup(2, timeout_s=0.2).run(body)


def test_tables_that_disagree_are_caught():
    def body(transport: Transport) -> None:
        rows = torch.zeros(2, 16, dtype=torch.uint8)
        transport.exchange(rows, np.array([[1, 1 + transport.rank], [1, 1]])).wait()

    with pytest.raises(AssertionError, match="exchange tables disagree"):
        ThreadGroup(2, timeout_s=5.0).run(body)


def one_rank_raises() -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        raise ValueError("document 3 is broken")
    transport = ProcessGroupTransport(group=group)
    transport.exchange(torch.zeros(3, 16, dtype=torch.uint8), ONE_EACH).wait()
    return "reached"


def test_a_raising_process_rank_ends_the_others_within_the_timeout():
    outcomes = run_outcomes(3, one_rank_raises, timeout_s=30.0)
    assert "ValueError: document 3 is broken" in outcomes[1].error
    for rank in (0, 2):
        assert outcomes[rank].is_done, "hung"
        assert "imed out" in outcomes[rank].error, outcomes[rank].error


def one_rank_stalls() -> float:
    """Seconds until a rank that does not stall is released, by an error."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(20)
    start = time.monotonic()
    transport = ProcessGroupTransport(group=group)
    with pytest.raises(RuntimeError, match=r"imed out"):
        transport.exchange(torch.zeros(3, 16, dtype=torch.uint8), ONE_EACH).wait()
    return time.monotonic() - start


def test_a_stalled_process_rank_holds_nobody_beyond_the_timeout():
    outcomes = run_outcomes(3, one_rank_stalls, timeout_s=10.0)
    assert not outcomes[1].is_done
    for rank in (0, 2):
        assert outcomes[rank].is_done, "hung"
        assert outcomes[rank].value < 5.0, outcomes[rank].error


def sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def fail_on_rank_1() -> None:
    assert dist.get_rank() != 1, "as told"


def test_the_gloo_helper_names_what_failed_and_what_hung():
    with pytest.raises(GlooError, match=r"(?s)hung for 1\.0 s.*did not finish: \[0\]"):
        run_gloo(2, sleep_on_rank_0, timeout_s=1.0)
    with pytest.raises(GlooError, match=r"(?s)rank 1 of 2:.*as told.*did not finish: \[\]"):
        run_gloo(2, fail_on_rank_1)
    assert run_gloo(2, on_gloo, rank_and_size) == [(0, 2), (1, 2)]
