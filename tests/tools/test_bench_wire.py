"""The tool that decides the wire format: its reference, and its figures on a small document."""

import json

import pytest
import torch

from megatron_splitkv.plan import Causal, Full, make_plan
from tests.ranks import Heads, dense, random_inputs
from tools import bench_wire


@pytest.mark.parametrize("queries", [Causal(), Full()], ids=str)
def test_reference_is_dense_attention(queries):
    plan = make_plan([65], 1, queries=queries)
    inputs = random_inputs(plan, Heads(q=4, kv=2, dim_qk=16, dim_v=16))
    rows = torch.tensor([0, 7, 64])
    tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
    out, dq = bench_wire.dense_fp64(tensors, rows, queries)
    expected = dense(plan, inputs)
    torch.testing.assert_close(out, expected.out[rows])
    torch.testing.assert_close(dq, expected.dq[rows])


def test_figures_of_a_small_document(monkeypatch, tmp_path, capsys):
    path = tmp_path / "figures.json"
    command = "bench_wire --length 512 --heads 2 1 --head-dim 32 --mask full --json"
    monkeypatch.setattr("sys.argv", [*command.split(), str(path)])
    bench_wire.main()
    assert "cp 8 / cp 1" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["cp_sizes"] == [1, 2, 4, 8]
    for name in ("out", "dq"):
        errors = {kind: values[name] for kind, values in found["errors"].items()}
        assert errors["fp32"][-1] == pytest.approx(errors["fp32"][0], rel=1e-2)
        assert errors["fp16"][-1] < 1.05 * errors["fp16"][0]
        assert errors["bf16"][-1] > 1.25 * errors["bf16"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--length 0", "0 must be a whole number, 1 or more"),
        ("--heads 4 3", "kv heads must divide query heads"),
        ("--json /no/such/x", "in a folder that exists"),
    ],
)
def test_wrong_options_are_named(options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_wire", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        bench_wire.main()
    assert message in capsys.readouterr().err
