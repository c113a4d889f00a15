"""The figures of a plan against counts by hand; bytes on the wire are in tests/attention."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal, Full, Suffix, Window, make_plan, plan_exchange
from megatron_splitkv.plan.report import (
    AttentionShape,
    kv_ring_bytes,
    max_over_mean,
    report_plan,
)

SHAPE = AttentionShape(num_heads_q=2, num_heads_kv=1, head_dim_qk=5, head_dim_v=8, dtype="bf16")


def test_bytes_of_a_row_by_hand():
    """Each field is padded to 16 bytes: q 20 -> 32, lse and delta 8 -> 16."""
    config = SplitKVConfig(partial_dtype="fp32")
    assert SHAPE.forward_bytes(config) == (32, 64 + 16)
    assert SHAPE.backward_bytes(config) == (32 + 16 + 16 + 32, 48)
    scaled = SplitKVConfig(partial_dtype="fp16")
    assert SHAPE.forward_bytes(scaled) == (32, 32 + 16 + 16)
    assert SHAPE.backward_bytes(scaled) == (32 + 16 + 16 + 32, 32 + 16)
    assert SHAPE.forward_bytes(SplitKVConfig()) == SHAPE.forward_bytes(scaled)
    kept = SplitKVConfig(keep_queries=True, partial_dtype="bf16")
    assert SHAPE.forward_bytes(kept) == (32, 32 + 16)
    assert SHAPE.backward_bytes(kept) == (32 + 16 + 16, 32)


def test_report_counts_loads_documents_and_bytes():
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    report = report_plan(plan, SHAPE, SplitKVConfig(partial_dtype="fp32"))
    rows = plan_exchange(plan).sent(4)
    sent, answered = rows.sum(1), rows.sum(0)
    assert report.bytes_forward == tuple((sent * 32 + answered * 80).tolist())
    assert report.bytes_backward == tuple((sent * 96 + answered * 48).tolist())
    assert (report.cost, report.tokens) == (plan.costs, plan.tokens)
    assert report.cost_max_over_mean <= 1.02
    assert report.tokens_max_over_mean <= 1.10
    found = report.as_dict()
    assert found["fingerprint"] == plan.fingerprint
    assert found["bytes_forward"] == sum(report.bytes_forward)
    assert [rank["cost"] for rank in found["ranks"]] == list(plan.costs)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]


def test_report_counts_documents():
    plan = make_plan([64, 0, 64, 128], 2, block_size=64, queries=Full(), tolerance=1.0)
    report = report_plan(plan, SHAPE, SplitKVConfig())
    ranks = [set(), set()]
    for rank, doc, _, _ in plan.runs.tolist():
        ranks[rank].add(doc)
    assert report.documents == tuple(len(docs) for docs in ranks)
    assert report.runs == tuple(np.bincount(plan.runs[:, 0], minlength=2).tolist())
    assert report.whole_documents == 3 - len(ranks[0] & ranks[1])


def test_whole_documents_cost_no_bytes():
    report = report_plan(make_plan([64] * 8, 4, block_size=64), SHAPE, SplitKVConfig())
    assert report.whole_documents == 8
    assert report.bytes_forward == report.bytes_backward == (0, 0, 0, 0)


def test_bytes_depend_on_query_rows_alone():
    """The same rows over twice the context, all ranks needed in both: the same bytes."""
    config = SplitKVConfig(num_stages=2, partial_dtype="fp32")
    reports = [
        report_plan(make_plan([length], 4, queries=Suffix(64), block_size=64), SHAPE, config)
        for length in (4096, 8192, 1 << 20)
    ]
    assert len({report.bytes_forward for report in reports}) == 1
    assert len({report.bytes_backward for report in reports}) == 1
    assert sum(reports[0].bytes_forward) == 3 * 64 * (32 + 80)


def test_empty_pack_reports_zeros():
    report = report_plan(make_plan([0], 3), SHAPE, SplitKVConfig())
    assert report.cost == report.tokens == report.runs == report.documents == (0, 0, 0)
    assert report.cost_max_over_mean == report.tokens_max_over_mean == 1.0


def test_table_shows_every_rank_and_the_ratios():
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    text = io.StringIO()
    Console(file=text, width=79).print(report_plan(plan, SHAPE, SplitKVConfig()).as_table())
    lines = text.getvalue()
    for rank in range(4):
        assert f"{plan.costs[rank]:,}" in lines
    assert f"{max_over_mean(plan.costs):.4f}" in lines
    assert all(len(line) <= 79 for line in lines.splitlines())
    caption = (
        "MB (10^6 bytes): sent by this rank in one attention layer, for 2 query heads of dim 5 "
        "(qk) and 8 (v) in bf16, partials in fp16; queries travel"
    )
    assert caption in " ".join(lines.split())


def test_table_of_keys_says_so():
    plan = make_plan([20000, 12000, 768], 4, block_size=512, route="keys")
    report = report_plan(plan, SHAPE, SplitKVConfig(route="keys"))
    text = io.StringIO()
    Console(file=text, width=79).print(report.as_table())
    lines = text.getvalue()
    caption = "for 1 kv heads of dim 5 (qk) and 8 (v) in bf16, gradients in fp16; keys travel"
    assert caption in " ".join(lines.split())
    assert all(len(line) <= 79 for line in lines.splitlines())
    assert report.as_dict()["route"] == "keys"


@pytest.mark.parametrize("queries", [Causal(), Window(3), Suffix(2)])
def test_a_kv_ring_sends_all_keys_to_every_rank(queries):
    """By hand: each of 3 heads weighs (5 + 8) * 2 bytes a token, pads travel like tokens."""
    plan = make_plan([60, 7], 4, queries=queries, padded_lens=[64, 7])
    shape = AttentionShape(num_heads_q=6, num_heads_kv=3, head_dim_qk=5, head_dim_v=8, dtype="bf16")
    by_rank = [(71 - own) * 3 * 13 * 2 for own in plan.tokens]  # what the rank receives
    assert kv_ring_bytes(plan, shape) == (sum(by_rank), 2 * sum(by_rank))
    assert kv_ring_bytes(make_plan([60], 1), shape) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp8"}, "dtype='fp8' is unknown; use fp32, bf16, fp16"),
        ({"num_heads_kv": 3}, "num_heads_kv=3 must divide num_heads_q=2"),
        ({"num_heads_kv": 4}, "num_heads_kv=4 must divide num_heads_q=2"),
        ({"num_heads_kv": 0}, "heads and head dims must be at least 1"),
        ({"num_heads_q": 0}, "heads and head dims must be at least 1"),
        ({"head_dim_v": -1}, "heads and head dims must be at least 1"),
    ],
)
def test_bad_shape_says_what_and_how(change, message):
    fields = {
        "num_heads_q": 2, "num_heads_kv": 2, "head_dim_qk": 8, "head_dim_v": 8, "dtype": "bf16",
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionShape(**fields)
