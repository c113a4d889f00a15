"""TransformerEngine in `bench_cp.py`, as far as it goes without a GPU; steps without the wire."""

import numpy as np
import pytest
import torch
from bench_cp import build_parser, kinds_of, refuse_mode
from cp_baselines import METHODS
from cp_methods import SplitKV
from cp_peers import PEERS, TransformerEngineP2P
from cp_report import Line, cells, over_best_other
from cp_transports import SilentTransport
from cp_workloads import Workload

from megatron_splitkv.comm import ThreadGroup
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Causal, Full, Suffix


def workload(queries, lens):
    return Workload(name="test", doc_lens=lens, queries=queries, heads=(4, 2), head_dim=16)


@pytest.mark.parametrize("name", PEERS)
def test_refused_by_name(name):
    assert PEERS[name].refusal(workload(Causal(), (64,)), 2) is not None


def test_masks_that_it_has_not_are_refused(monkeypatch):
    monkeypatch.setattr("cp_peers.missing", lambda: None)
    refusal = TransformerEngineP2P.refusal
    assert refusal(workload(Causal(), (64, 3)), 2) is None
    assert refusal(workload(Suffix(8), (64,)), 2) is None
    assert "several documents" in refusal(workload(Suffix(8), (64, 64)), 2)
    assert "Full()" in refusal(workload(Full(), (64,)), 2)


@pytest.mark.parametrize("lens", [(301, 1, 77), (13,)])
def test_documents_are_lengthened_for_zigzag(lens):
    method = TransformerEngineP2P(workload(Causal(), lens), 2, SplitKVConfig())
    padded = method.workload.doc_lens
    assert all(0 <= new - old < 4 and new % 4 == 0 for old, new in zip(lens, padded, strict=True))
    assert sorted(np.concatenate(method.tokens)) == list(range(sum(padded)))
    assert len({len(own) for own in method.tokens}) == 1


def test_the_small_problem_fits_and_has_its_mask():
    packed = TransformerEngineP2P.small(workload(Causal(), (9, 9)), 3)
    assert len(packed.doc_lens) > 1
    assert all(length % 6 == 0 for length in packed.doc_lens)
    rows = TransformerEngineP2P.small(workload(Suffix(512), (4096,)), 3)
    assert len(rows.doc_lens) == 1
    assert rows.queries.num_rows % 6 == 0
    assert TransformerEngineP2P.mask(rows).all(), "its rows see all keys"
    assert not SplitKV.mask(rows).all()
    assert not TransformerEngineP2P.mask(packed).all()


def silent_body(transport) -> list[torch.Tensor]:
    silent = SilentTransport(transport)
    counts = np.full((2, 2), 3)

    def step(value: int) -> torch.Tensor:
        rows = silent.send_buffer(counts, 16, torch.device("cpu")).fill_(value + transport.rank)
        return silent.exchange(rows, counts).wait().clone()

    found = []
    for value, how in enumerate(({}, {"is_recording": True}, {}, {"is_silent": True})):
        silent.restart(**how)
        found.append(step(10 * value))
    return found


def test_a_silent_step_gives_the_rows_of_the_recorded_one():
    for found in ThreadGroup(2).run(silent_body):
        assert [rows[:, 0].tolist() for rows in found] == [
            3 * [value] + 3 * [value + 1] for value in (0, 10, 20, 10)
        ]


def parsed(*words: str):
    return build_parser().parse_args(["real", *words])


def test_each_transport_and_bound_of_stages_is_a_method():
    args = parsed("--methods", "split-kv", "ring", "te-a2a", "--stages", "1", "4")
    names = [kind.name for kind in kinds_of(args, {"nccl": None, "symmetric": None})]
    assert names == [
        "split-kv nccl 1", "split-kv nccl 4", "split-kv symmetric 1", "split-kv symmetric 4",
        "ring nccl", "ring symmetric", "te-a2a",
    ]  # fmt: skip
    assert kinds_of(parsed(), {"auto": None}) == list(METHODS.values())
    words = ("--methods", "split-kv", "--stages", "1", "2", "--route", "queries")
    two, four = kinds_of(parsed(*words), {"auto": None})
    long = workload(Causal(), (1 << 14,))
    assert len(two(long, 2, SplitKVConfig()).layouts[0].stages) == 1
    assert len(four(long, 2, SplitKVConfig()).layouts[0].stages) == 2


def test_each_route_is_a_method():
    args = parsed("--methods", "split-kv", "ring", "--route", "queries", "keys")
    kinds = kinds_of(args, {"auto": None})
    assert [kind.name for kind in kinds] == ["split-kv queries", "split-kv keys", "ring"]
    case = workload(Causal(), (1 << 10,))
    for kind, route in zip(kinds, ("queries", "keys"), strict=False):
        placed = kind(case, 2, SplitKVConfig())
        assert placed.plan.route == route
        assert (placed.layouts[0].keys is not None) == (route == "keys")
    rows = workload(Suffix(50), (1 << 10,))
    assert [kind.refusal(rows, 2) for kind in kinds[::2]] == [None, None]
    assert kinds[1].refusal(rows, 2) == "keys do not travel with the mask Suffix(num_rows=50)"


def test_replay_has_no_peers(monkeypatch):
    args = build_parser().parse_args(["replay", "--methods", "te-p2p"])
    with pytest.raises(ValueError, match="te-p2p, te-all-gather, te-a2a need real ranks"):
        refuse_mode(args)


def test_the_best_peer_is_a_column_of_its_own():
    lines = [
        Line(workload="w", method=name, cp_size=2, mode="real", forward_ms=ms, backward_ms=ms)
        for name, ms in (("split-kv", 2.0), ("ring", 1.0), ("te-p2p", 5.0), ("te-a2a", 3.0))
    ]
    assert over_best_other(lines[0], lines) == 0.5
    assert over_best_other(lines[0], lines, "te-") == 1.5
    assert cells(lines[0], lines)[-2:] == ["0.50", "1.50"]
