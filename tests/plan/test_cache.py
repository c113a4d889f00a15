"""`PlanCache`: what it keeps, and plans that are made in other processes."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from megatron_splitkv.plan import Anchors, Plan, PlanCache, Prefix, make_plan


def test_plans_are_made_once_and_forgotten_by_bytes():
    plans = [make_plan([1024 + 128 * i], 4) for i in range(5)]
    size = plans[0].nbytes
    cache = PlanCache(3 * size)
    made: list[int] = []

    def get(i: int) -> tuple[Plan, bool]:
        def make() -> Plan:
            made.append(i)
            return plans[i]

        return cache.get(i, make)

    assert [get(i) for i in (0, 1, 0, 2)] == [
        (plans[0], True), (plans[1], True), (plans[0], False), (plans[2], True),
    ]  # fmt: skip
    assert get(3) == (plans[3], True)
    assert (len(cache), cache.num_bytes) == (3, 3 * size)
    assert get(1) == (plans[1], True), "the least recently used one was forgotten"
    assert made == [0, 1, 2, 3, 1]
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_the_last_plan_stays_however_large():
    cache = PlanCache(1)
    plan = make_plan([5], 2)
    assert cache.get("a", lambda: plan) == (plan, True)
    assert cache.get("a", lambda: plan) == (plan, False)
    assert cache.get("b", lambda: plan) == (plan, True)
    assert len(cache) == 1


def test_bytes_of_a_plan_cover_what_it_holds():
    plan = make_plan([64] * 1000, 8, queries=Anchors(((3, 9, 60),) * 1000, 2))
    assert plan.nbytes >= plan.runs.nbytes + 8 * (1000 + 3000)
    assert (
        make_plan([64] * 10, 8, queries=Prefix((3,) * 10)).nbytes > make_plan([64] * 10, 8).nbytes
    )


def test_a_worker_of_the_data_loader_plans_ahead():
    """Another process makes the same plan, and it travels as a pickle."""
    packs = [[700, 300, 24], [64] * 40, [1, 0, 5000]]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as workers:
        ahead = list(workers.map(make_plan, packs, [4] * 3, timeout=100))
    for pack, plan in zip(packs, ahead, strict=True):
        assert plan == make_plan(pack, 4)
        np.testing.assert_array_equal(plan.runs, make_plan(pack, 4).runs)
        assert not plan.runs.flags.writeable
        assert pickle.loads(pickle.dumps(plan)) == plan
