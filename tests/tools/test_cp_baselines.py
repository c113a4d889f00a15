"""The methods of `bench_cp.py` against dense fp64, each on simulated ranks, and what they send."""

import numpy as np
import pytest
import torch
from cp_baselines import METHODS, Ulysses
from cp_gate import check_on_threads
from cp_methods import RankInputs, variant
from cp_workloads import WORKLOADS, Workload, even_split, pile_lens, zigzag_rows, zigzag_tokens

from megatron_splitkv.checks.counting import CountingTransport
from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal, Suffix, Window, make_plan
from megatron_splitkv.plan.report import AttentionShape, kv_ring_bytes, report_plan
from tests.oracle import assert_matches, attend
from tests.packs import plan_mask
from tests.tolerances import BF16, FP32, GRADIENT_BY_DTYPE

LENS = (61, 1, 0, 90, 13)
CPU = torch.device("cpu")


def workload(queries=None, heads=(4, 2), lens=LENS) -> Workload:
    return Workload(
        name="test", doc_lens=lens, queries=queries or Causal(), heads=heads, head_dim=16
    )


def run(method, tensors, transports=None):
    """out, dq, dk, dv in stream order, and the bytes of each rank."""
    q, k, v, dout = tensors
    parts, sent = [None] * method.cp_size, [0] * method.cp_size

    def body(transport):
        counting = CountingTransport(transport)
        rank = transport.rank
        rows, tokens = (torch.from_numpy(x[rank]) for x in (method.rows, method.tokens))
        part = method.part(rank, counting, CPU)
        mine = RankInputs(q=q[rows], k=k[tokens], v=v[tokens], dout=dout[rows])
        parts[rank] = (part.forward(mine), *part.backward(mine.dout))
        sent[rank] = counting.bytes_sent

    ThreadGroup(method.cp_size).run(body)
    orders = [method.rows, method.rows, method.tokens, method.tokens]
    joined = []
    for index, order in enumerate(orders):
        back = torch.from_numpy(np.concatenate(order).argsort())
        joined.append(torch.cat([part[index] for part in parts])[back])
    return joined, sent


def draw(case, dtype):
    plan = case.whole()
    rows, tokens = len(plan.model().row_intervals()), case.num_tokens
    generator = torch.Generator().manual_seed(4)
    counts = (rows, case.heads[0]), (tokens, case.heads[1]), (tokens, case.heads[1])
    return [
        torch.randn(*count, case.head_dim, generator=generator).to(dtype)
        for count in (*counts, (rows, case.heads[0]))
    ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("queries", [Causal(), Suffix(20), Window(17)], ids=str)
@pytest.mark.parametrize("heads", [(12, 12), (12, 4), (12, 2), (12, 1)], ids=str)
def test_equals_dense_attention(name, cp_size, queries, heads):
    case = workload(queries, heads)
    if METHODS[name].refusal(case, cp_size):
        pytest.skip(METHODS[name].refusal(case, cp_size))
    q, k, v, dout = draw(case, torch.float32)
    mask = torch.from_numpy(plan_mask(case.whole()))
    due = attend(q, k, v, mask, softmax_scale=16**-0.5, dout=dout)
    method = METHODS[name](case, cp_size, SplitKVConfig(num_stages=2))
    got, _ = run(method, (q, k, v, dout))
    for what, mine in zip(("out", "dq", "dk", "dv"), got, strict=True):
        assert_matches(what, mine, getattr(due, what), FP32)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("partial_dtype", ["fp32", "bf16"])
def test_equals_dense_attention_in_bf16(name, partial_dtype):
    case = workload(heads=(8, 2))
    q, k, v, dout = draw(case, torch.bfloat16)
    mask = torch.from_numpy(plan_mask(case.whole()))
    due = attend(q, k, v, mask, softmax_scale=16**-0.5, dout=dout)
    config = SplitKVConfig(partial_dtype=partial_dtype)
    got, _ = run(METHODS[name](case, 4, config), (q, k, v, dout))
    # Sums that travel in bf16 are rounded once or, in the ring, at each of its ranks.
    more = 1 if partial_dtype == "fp32" else 2
    for what, mine in zip(("out", "dq", "dk", "dv"), got, strict=True):
        base = BF16 if what == "out" else GRADIENT_BY_DTYPE[torch.bfloat16]
        tolerance = type(base)(rel_l2=more * base.rel_l2, worst_row=more * base.worst_row)
        assert_matches(what, mine, getattr(due, what), tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_one_rank_needs_no_transport(name):
    case = workload()
    q, k, v, dout = draw(case, torch.float32)
    part = METHODS[name](case, 1, SplitKVConfig()).part(0, None, CPU)
    before = set(vars(part))
    out = part.forward(RankInputs(q=q, k=k, v=v, dout=dout))
    mask = torch.from_numpy(plan_mask(case.whole()))
    due = attend(q, k, v, mask, softmax_scale=16**-0.5, dout=dout)
    assert_matches("out", out, due.out, FP32)
    for what, mine in zip(("dq", "dk", "dv"), part.backward(dout), strict=True):
        assert_matches(what, mine, getattr(due, what), FP32)
    kept = {name for name in set(vars(part)) - before if torch.is_tensor(getattr(part, name))}
    assert not kept, "the next step would be measured with less memory than it needs"


SHAPE = AttentionShape(num_heads_q=4, num_heads_kv=2, head_dim_qk=16, head_dim_v=16, dtype="fp32")


def test_bytes_are_those_of_the_formulas():
    """Literature: a ring sends KV forward, and KV and its gradients backward."""
    case = workload(lens=(64, 128))
    tensors = draw(case, torch.float32)
    config = SplitKVConfig(partial_dtype="fp32")
    plan = make_plan(case.doc_lens, 4)
    forward, backward = kv_ring_bytes(plan, SHAPE)
    _, sent = run(METHODS["all-gather"](case, 4, config), tensors)
    assert sum(sent) == forward + backward
    _, sent = run(METHODS["ring"](case, 4, config), tensors)
    # The gradients also go home from the last rank that added to them: 4 hops, not 3.
    assert sum(sent) == forward + backward // 2 + backward // 2 * 4 // 3
    _, sent = run(METHODS["ulysses"](case, 4, config), tensors)
    row, token = 4 * 16 * 4, 2 * 16 * 4  # kv heads are repeated: 4 of each rank, not 2
    assert sum(sent) == 192 * 3 // 4 * (4 * row + 4 * 2 * token)
    assert case.route(4) == "keys"
    for route, due in (("queries", "queries"), ("keys", "keys"), ("auto", "keys")):
        kind = variant(METHODS["split-kv"], [route], None, None, route)
        _, sent = run(kind(case, 4, config), tensors)
        report = report_plan(make_plan(case.doc_lens, 4, route=due), SHAPE, config)
        assert sum(sent) == sum(report.bytes_forward) + sum(report.bytes_backward)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_zigzag_holds_each_token_once_and_shares_the_work(cp_size):
    lens = (4096, 1, 0, 33, 700)
    parts = zigzag_tokens(lens, cp_size)
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(lens)))
    assert all((np.diff(part) > 0).all() for part in parts)
    ends = workload(lens=lens).whole().model().row_intervals()
    pairs = [int((ends[part, 1] - ends[part, 0]).sum()) for part in parts]
    assert max(pairs) <= 1.01 * sum(pairs) / cp_size


def test_rows_of_a_suffix_are_dealt_like_a_document():
    parts = zigzag_rows(workload(Suffix(16), lens=(100, 7)), 2)
    assert [part.tolist() for part in parts] == [
        [0, 1, 2, 3, 12, 13, 14, 15, 16, 21, 22],
        [4, 5, 6, 7, 8, 9, 10, 11, 17, 18, 19, 20],
    ]


def test_even_split():
    assert [part.tolist() for part in even_split(5, 3)] == [[0], [1, 2], [3, 4]]


def test_pile_lengths_fill_the_pack_and_repeat():
    lens = pile_lens(131072)
    assert sum(lens) == 131072 and lens == pile_lens(131072)
    assert 1500 < np.median(lens) < 3000


def test_ulysses_says_why_it_cannot():
    assert "4 query heads do not divide over 8 ranks" in Ulysses.refusal(workload(), 8)
    assert "4 kv heads neither" in Ulysses.refusal(workload(heads=(24, 4)), 6)
    assert Ulysses.refusal(workload(), 4) is None


def test_names_are_unique():
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)


def test_a_wrong_method_is_not_timed(monkeypatch):
    from cp_baselines import _AllGatherPart

    monkeypatch.setattr(
        _AllGatherPart, "backward", lambda self, dout: (dout, self.inputs.k, self.inputs.v)
    )
    with pytest.raises(ValueError, match="all-gather differs from dense fp64"):
        check_on_threads(list(METHODS.values()), workload(), CPU, torch.float32, SplitKVConfig())
