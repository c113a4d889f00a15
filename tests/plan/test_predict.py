"""Predicted layer times against counts by hand, and the choice of a tolerance."""

import dataclasses

import pytest

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Full, Machine, make_plan
from megatron_splitkv.plan.predict import (
    AUTO_TOLERANCES,
    Calibration,
    Network,
    calibration_from_json,
    make_plan_by_time,
    predict_layer,
    read_calibration,
)
from megatron_splitkv.plan.report import AttentionShape

SHAPE = AttentionShape(num_heads_q=4, num_heads_kv=4, head_dim_qk=64, head_dim_v=64, dtype="bf16")
CALIBRATION = Calibration(
    device="made up", dtype="bf16", head_dim=64, num_heads_q=2, num_heads_kv=2, pair_ns=0.01,
    row_ns=2.0, run_ns=30.0, base_ns=500.0, worst_error=0.0, link_gb_per_s=10.0,
    link_latency_us=1.0, source="by hand",
)  # fmt: skip


def test_prediction_by_hand():
    """One document of 256 tokens in two runs a rank, four heads where two were measured."""
    plan = make_plan([256], 2, block_size=64)
    assert plan.runs.tolist() == [[0, 0, 0, 64], [0, 0, 192, 256], [1, 0, 64, 192]]
    config = SplitKVConfig(num_stages=1)
    found = predict_layer(plan, SHAPE, config, CALIBRATION)
    # Rank 0 attends with all 256 rows, 128 of them from rank 1; rank 1 with 192, 64 from rank 0.
    pairs = 256 * 257 // 2 // 2
    assert sum(plan.costs) == 2 * pairs
    computed = [
        (2 * (cost * 0.01 + rows * 2.0 + runs * 30.0) + 500.0) / 1e3
        for cost, rows, runs in zip(plan.costs, (256, 192), (2, 1), strict=True)
    ]
    assert found.compute_us == pytest.approx(max(computed))
    out = SHAPE.forward_bytes(config)[0] + SHAPE.backward_bytes(config)[0]
    back = SHAPE.forward_bytes(config)[1] + SHAPE.backward_bytes(config)[1]
    largest = max(64 * out + 128 * back, 128 * out + 64 * back)
    exchanged = largest / 10.0 / 1e3 + 4 * 1.0
    assert found.exchange_us == pytest.approx(exchanged)
    assert found.layer_us == pytest.approx(max(computed) + exchanged)


def test_prediction_where_keys_travel_by_hand():
    """The same document, whose rows at both ends are on rank 0 and those between on rank 1."""
    plan = make_plan([256], 2, block_size=64, route="keys")
    assert plan.runs.tolist() == [[0, 0, 0, 64], [0, 0, 192, 256], [1, 0, 64, 192]]
    config = SplitKVConfig(num_stages=2, route="keys")
    found = predict_layer(plan, SHAPE, config, CALIBRATION)
    # Each attends with its own 128 rows alone. Those of rank 0 see all 128 keys of rank 1, those of
    # rank 1 the first 64 keys of rank 0.
    computed = [
        (2 * (cost * 0.01 + 128 * 2.0 + runs * 30.0) + 500.0) / 1e3
        for cost, runs in zip(plan.costs, (2, 1), strict=True)
    ]
    assert found.compute_us == pytest.approx(max(computed))
    key, gradient = SHAPE.key_bytes(config, 2)
    largest = max(64 * 2 * key + 128 * gradient, 128 * 2 * key + 64 * gradient)
    exchanged = largest / 10.0 / 1e3 + 4 * 2 * 1.0
    assert found.exchange_us == pytest.approx(exchanged)
    longer, shorter = max(computed[0], exchanged), min(computed[0], exchanged)
    assert found.layer_us == pytest.approx(longer + shorter / 2)


def test_what_leaves_a_node_takes_the_network():
    """Four ranks with 64 rows each that all need: a node is two ranks."""
    plan = make_plan([256], 4, queries=Full(), block_size=64)
    config = SplitKVConfig(num_stages=1)
    out, back = (
        forward + backward
        for forward, backward in zip(
            SHAPE.forward_bytes(config), SHAPE.backward_bytes(config), strict=True
        )
    )
    row_us = 64 * (out + back) / 1e3  # at 1 GB/s
    latency = 4 * CALIBRATION.link_latency_us
    for gb_per_s, slowest in ((0.5, 2 * row_us / 0.5), (1e3, 1 * row_us / 10.0)):
        network = Network(ranks_per_node=2, gb_per_s=gb_per_s)
        found = predict_layer(plan, SHAPE, config, CALIBRATION, network=network)
        assert found.exchange_us == pytest.approx(slowest + latency)
    one_node = Network(ranks_per_node=4, gb_per_s=0.5)
    assert predict_layer(plan, SHAPE, config, CALIBRATION, network=one_node) == predict_layer(
        plan, SHAPE, config, CALIBRATION
    )
    for bad, message in ((dict(ranks_per_node=0), "ranks_per_node=0"), (dict(gb_per_s=0.0), "0.0")):
        with pytest.raises(ValueError, match=message):
            Network(**(dict(ranks_per_node=8, gb_per_s=45.0) | bad))


def test_stages_overlap():
    plan = make_plan([4096], 8)
    one, four = (
        predict_layer(plan, SHAPE, SplitKVConfig(num_stages=stages), CALIBRATION)
        for stages in (2, 4)
    )
    assert four.layer_us < one.layer_us


def test_whole_documents_exchange_nothing():
    found = predict_layer(make_plan([64] * 8, 4), SHAPE, SplitKVConfig(), CALIBRATION)
    assert found.exchange_us == 0.0
    assert found.layer_us == found.compute_us


def test_auto_weighs_imbalance_against_traffic():
    """Where the link is slow a looser tolerance wins, where it is fast the balance does."""
    lens, options = [9000, 7000, 4000, 3000, 2000], dict(shape=SHAPE, config=SplitKVConfig())
    slow, fast = (
        make_plan_by_time(
            lens, 2, calibration=dataclasses.replace(CALIBRATION, link_gb_per_s=link), **options
        )
        for link in (0.01, 1e6)
    )
    for plan, tolerance, found in (slow, fast):
        assert set(found) == set(AUTO_TOLERANCES)
        assert found[tolerance].layer_us == min(one.layer_us for one in found.values())
        assert plan.num_tokens == sum(lens)
    assert slow[1] > fast[1]


def test_a_calibration_says_what_rows_and_runs_cost():
    assert CALIBRATION.machine == Machine(row_pairs=200, run_pairs=3000)
    assert calibration_from_json(CALIBRATION.to_json()) == CALIBRATION


def test_slow_ranks_take_longer():
    plan = make_plan([4096], 2)
    even, slow = (
        predict_layer(plan, SHAPE, SplitKVConfig(), CALIBRATION, speeds)
        for speeds in ((), (1.0, 0.5))
    )
    assert slow.compute_us > 1.5 * even.compute_us


def test_a_file_is_named(tmp_path):
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ValueError, match=r"c\.json: calibration must be a JSON object .*calibrate"):
        read_calibration(tmp_path / "c.json")
