"""`tools/plan_blocks.py`: what it says of a plan, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megatron_splitkv.plan import Anchors, Causal, Full, Prefix, Suffix, Window, make_plan
from tests.tools.plan_tool import EXAMPLE, PACK, ROOT, figures, run_tool


def test_json_has_the_promised_keys():
    found = figures(*EXAMPLE)
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    assert found["fingerprint"] == plan.fingerprint
    assert found["cost_max_over_mean"] <= 1.02
    assert found["tokens_max_over_mean"] == 1.0
    assert found["planning_ms"] > 0
    assert found["bytes_forward"] > 0
    assert found["bytes_backward"] > 0
    assert found["block_size"] == 512
    assert [rank["cost"] for rank in found["ranks"]] == list(plan.costs)
    assert [rank["tokens"] for rank in found["ranks"]] == [8192] * 4


def test_the_script_runs_by_its_path():
    command = [sys.executable, str(ROOT / "tools/plan_blocks.py"), *EXAMPLE, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["tokens_max_over_mean"] == 1.0


def test_table_shows_ranks_and_ratios():
    run = run_tool(*EXAMPLE)
    assert run.returncode == 0, run.stderr
    plan = make_plan([20000, 12000, 768], 4, block_size=512)
    for text in ("max/mean", plan.fingerprint, "8,192", *(f"{cost:,}" for cost in plan.costs)):
        assert text in run.stdout
    assert "3 documents" in run.stdout


def test_table_says_what_was_counted_and_what_a_ring_would_send():
    run = run_tool(*EXAMPLE)
    words = " ".join(run.stdout.split())
    assert "sent by this rank in one attention layer, for 32 query heads of dim 128" in words
    assert "KV ring or all-gather 100.66 MB fwd, 201.33 MB bwd (8 kv heads, dense: every" in words
    found = figures(*EXAMPLE)
    forward, backward = (found[f"bytes_{name}"] / 4e6 for name in ("forward", "backward"))
    assert f"Split-KV {forward:.2f} MB fwd, {backward:.2f} MB bwd; KV ring" in words


@pytest.mark.parametrize(
    ("option", "num_heads_kv"),
    [((), 8), (("--heads", "32/8"), 8), (("--heads", "32/2"), 2), (("--heads", "32"), 32)],
)
def test_kv_heads_weigh_in_the_ring_alone_where_queries_travel(option, num_heads_kv):
    found = figures(*EXAMPLE, *option)
    assert found["ring_bytes_forward"] == 3 * 32768 * num_heads_kv * 2 * 128 * 2
    assert found["ring_bytes_backward"] == 2 * found["ring_bytes_forward"]
    assert found["bytes_forward"] == figures(*EXAMPLE)["bytes_forward"]


@pytest.mark.parametrize(
    ("option", "queries"),
    [
        ((), Causal()),
        (("--window", "100"), Window(100)),
        (("--full",), Full()),
        (("--suffix", "64"), Suffix(64)),
        (("--prefix", "400"), Prefix((400, 300))),
    ],
)
def test_masks(option, queries):
    route = "keys" if isinstance(queries, Causal | Window | Full) else "queries"
    plan = make_plan([700, 300], 2, queries=queries, tolerance=0.001, route=route)
    assert figures("--lengths", "700,300", "--cp", "2", *option)["fingerprint"] == plan.fingerprint


def test_options_change_the_bytes():
    base = figures(*EXAMPLE, "--stages", "4")
    half = figures(*EXAMPLE, "--partial-dtype", "bf16", "--keep-queries", "--heads", "16/2")
    assert half["bytes_forward"] < base["bytes_forward"] / 2
    assert half["bytes_backward"] < base["bytes_backward"] / 2
    assert half["fingerprint"] == base["fingerprint"]
    wide = figures(*EXAMPLE, "--dtype", "fp32", "--head-dim", "256")
    assert wide["bytes_forward"] > base["bytes_forward"]


def test_keys_travel_by_themselves_where_heads_are_grouped():
    """32 query heads to 8 of keys unless it is told; the balance is that of the query rows."""
    found = figures(*PACK)
    plan = make_plan([20000, 12000, 768], 4, block_size=512, route="keys")
    assert (found["route"], found["fingerprint"]) == ("keys", plan.fingerprint)
    assert found["cost_max_over_mean"] <= 1.001
    assert found["bytes_forward"] < figures(*EXAMPLE)["bytes_forward"] / 2
    assert found["bytes_forward"] <= found["ring_bytes_forward"]
    assert figures(*PACK, "--heads", "32")["route"] == "queries"
    assert figures(*PACK, "--heads", "32", "--route", "keys")["route"] == "keys"
    assert figures(*PACK, "--suffix", "64")["route"] == "queries"
    assert figures(*EXAMPLE)["route"] == "queries"


def test_report_and_comparison_name_the_route():
    words = " ".join(run_tool(*PACK, "--compare").stdout.split())
    assert "for 8 kv heads of dim 128 (qk) and 128 (v) in bf16, gradients in fp16; keys tr" in words
    assert "block size 512; route keys; planned in" in words
    assert "rows sent: rows of keys that travel in a layer" in words
    found = figures(*PACK, "--compare")["compared"]
    assert found["query-side LPT"]["imbalance"] < 0.01 < found["key-side LPT"]["imbalance"]


@pytest.mark.parametrize("lengths", ["0", "0,0,5", "1"])
def test_short_packs(lengths):
    found = figures("--lengths", lengths, "--cp", "4", "--compare")
    assert len(found["ranks"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "12,x", "--cp", "4"), "'12,x' must be whole numbers with commas between"),
        (("--lengths", "", "--cp", "4"), "'' must be whole numbers with commas between"),
        (("--lengths", "5,-3", "--cp", "4"), "'5,-3' holds a negative document length"),
        (("--lengths", "5", "--cp", "0"), "cp_size=0 must be at least 1"),
        (("--lengths", "5", "--cp", "-2"), "cp_size=-2 must be at least 1"),
        (("--lengths", "5", "--cp", "2", "--block-size", "0"), "block_size=0 must be a positive"),
        (
            ("--lengths", "5", "--cp", "2", "--block-size", "100"),
            "block_size=100 must be a positive multiple of 64 (the kernels' KV tile); use 128",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--tolerance", "nan"),
            "balance_tolerance=nan must lie in [0, 1]",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--tolerance=-1"),
            "balance_tolerance=-1.0 must lie in [0, 1]",
        ),
        (("--lengths", "5", "--cp", "100000"), "--cp 100000 must be at most 4096 ranks"),
        (
            ("--lengths", "99999999999999999999", "--cp", "4"),
            "doc_lens: length=99999999999999999999 must fit into 64 bits",
        ),
        (
            ("--lengths", "5,5000000000", "--cp", "4"),
            "document 1 of 5000000000 tokens brings query rows times keys of the pack beyond 2^61",
        ),
        (
            ("--lengths", "5", "--cp", "2", "--heads", "32/5"),
            "num_heads_kv=5 must divide num_heads_q=32",
        ),
        (("--lengths", "5", "--cp", "2", "--window", "0"), "window size=0 must be at least 1 key"),
        (("--lengths", "5", "--cp", "2", "--prefix=-1"), "prefix -1 of document 0 must lie in"),
        (("--distribution", "wlb", "--cp", "2", "--seed=-1"), "--seed -1 must be at least 0"),
        (
            ("--lengths", "5", "--cp", "2", "--packs", "3"),
            "--packs belongs to --distribution or --idx; give that, or leave it out",
        ),
        (("--lengths", "5", "--cp", "2", "--rows-per-anchor", "3"), "belongs to --anchors"),
        (("--distribution", "wlb", "--cp", "2", "--samples", "3"), "--samples belongs to --idx"),
        (("--lengths", "5", "--cp", "2", "--suffix", "0"), "suffix num_rows=0 must be at least 1"),
        (
            ("--lengths", "5", "--cp", "2", "--suffix", "2", "--route", "keys"),
            "route='keys' is for causal, window and full self-attention",
        ),
        (("--lengths", "5", "--cp", "2", "--route", "values"), "invalid choice: 'values'"),
        (("--lengths", "5", "--cp", "2", "--stages", "0"), "num_stages=0 must be at least 1"),
        (("--lengths", "5", "--cp", "2", "--heads", "8/x"), "'8/x' must be query heads / kv heads"),
        (
            ("--lengths", "5", "--cp", "2", "--head-dim", "0"),
            "heads and head dims must be at least",
        ),
        (("--lengths", "5", "--cp", "2", "--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("--lengths", "5", "--cp", "2", "--full", "--window", "3"), "not allowed with argument"),
        (("--cp", "2"), "--lengths --file --idx --distribution is required"),
        (("--lengths", "5", "--cp", "2", "--tolerence", "1"), "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, message):
    run = run_tool(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("plan_blocks.py: error: ")
    assert message in last
    assert "Traceback" not in run.stderr


def test_imbalance_before_and_after():
    found = figures(*EXAMPLE)["imbalance"]
    assert set(found) == {"contiguous", "zig-zag", "per-document zig-zag", "planned"}
    assert found["planned"] <= 0.001 < found["zig-zag"] < found["contiguous"]


def test_compare_places_the_pack_in_other_ways():
    run = run_tool(*EXAMPLE, "--compare")
    for name in ("contiguous", "sort and deal", "query-side LPT", "split-KV"):
        assert name in run.stdout
    found = figures(*EXAMPLE, "--compare")["compared"]
    assert found["query-side LPT"]["imbalance"] == pytest.approx(0.296, abs=0.001)
    assert "query-side LPT" not in figures(*EXAMPLE, "--suffix", "64", "--compare")["compared"]


def test_several_packs_have_one_line_and_one_is_shown(tmp_path):
    file = tmp_path / "packs.csv"
    file.write_text("700,300\n# a comment\n\n64,64,900\n")
    found = figures("--file", str(file), "--cp", "2", "--pack", "2")
    second = make_plan([64, 64, 900], 2, tolerance=0.001, route="keys")
    assert found["fingerprint"] == second.fingerprint == found["packs"][1]["fingerprint"]
    assert len(found["packs"]) == 2
    run = run_tool("--file", str(file), "--cp", "2")
    assert "2 packs: imbalance median" in " ".join(run.stdout.split())
    bad = run_tool("--file", str(file), "--cp", "2", "--pack", "3")
    assert "--pack 3 must lie in [1, 2]" in bad.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "1,2\n3,nan\n", "a.csv, line 2, entry 2: 'nan' is no document length"),
        ("a.csv", "1,2\n\n3,-4\n", "a.csv, line 3, entry 2: -4 is no document length"),
        ("a.csv", "# none\n", "a.csv: holds no lengths"),
        ("a.json", "[1,\n2,,3]", "a.json, line 2:"),
        ("a.json", "[[1, NaN]]", "a.json, pack 1, entry 2: nan is no document length"),
        ("a.json", "[[1], 2]", "a.json: entry 2 is 2, but others are lists"),
        ("a.json", '{"a": 1}', "a.json: must be a list of lengths"),
        ("a.txt", "1", "a.txt: use a file that ends in .json, .csv, .npy"),
        ("a.npy", "nonsense", "a.npy: "),
        ("a.npy", "", "a.npy: "),
        ("a.npy", "PK\x03\x04", "a.npy: "),  # an .npz by another name
        ("a.json", "[]", "a.json: holds no lengths"),
        ("a.json", f"[1{'0' * 400}]", "must fit into 64 bits"),
        ("a.json", "[" * 100_000, "a.json: maximum recursion depth"),
        ("a.csv", b"\xff1,2\n", "a.csv: 'utf-8' codec can't decode"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    run = run_tool("--file", str(file), "--cp", "2")
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_missing_file_is_named():
    run = run_tool("--file", "nowhere.csv", "--cp", "2")
    assert run.returncode == 2
    assert "nowhere.csv" in run.stderr


@pytest.mark.parametrize("lengths", [np.asarray([700, 300]), np.asarray([[700.0, 300.0]])])
def test_npy_and_json_say_the_same(tmp_path, lengths):
    np.save(tmp_path / "a.npy", lengths)
    (tmp_path / "a.json").write_text("[700, 300]")
    assert (
        figures("--file", str(tmp_path / "a.npy"), "--cp", "2")["fingerprint"]
        == figures("--file", str(tmp_path / "a.json"), "--cp", "2")["fingerprint"]
        == figures("--lengths", "700,300", "--cp", "2")["fingerprint"]
    )


def test_nan_in_npy_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.asarray([5.0, np.nan]))
    run = run_tool("--file", str(tmp_path / "a.npy"), "--cp", "2")
    assert "a.npy, pack 1, entry 2: nan is no document length" in run.stderr


@pytest.mark.parametrize("name", ["prolong", "wlb", "trajectories", "varlen", "web"])
def test_distributions_fill_the_pack_and_depend_on_the_seed(name):
    options = ("--distribution", name, "--tokens", "50000", "--cp", "2", "--packs", "2")
    found = figures(*options)
    assert sum(found["tokens"]) == 50000
    assert found == figures(*options) | {
        "planning_ms": found["planning_ms"],
        "packs": found["packs"],
    }
    assert found["fingerprint"] != figures(*options, "--seed", "7")["fingerprint"]


def test_anchors_by_count_and_by_file(tmp_path):
    spread = Anchors(((25, 50, 75, 100),), 16)
    plan = make_plan([100], 2, queries=spread, tolerance=0.001)
    options = ("--lengths", "100", "--cp", "2", "--anchors")
    assert figures(*options, "4")["fingerprint"] == plan.fingerprint
    (tmp_path / "a.json").write_text("[[25, 50, 75, 100]]")
    assert figures(*options, str(tmp_path / "a.json"))["fingerprint"] == plan.fingerprint
    (tmp_path / "b.json").write_text("[[25,\n 50")
    run = run_tool(*options, str(tmp_path / "b.json"))
    assert run.returncode == 2
    assert "b.json, line 2:" in run.stderr


def test_speeds_and_nodes():
    fast = figures("--lengths", "65536", "--cp", "2", "--speeds", "1,0.5")
    assert fast["cost"][0] == pytest.approx(2 * fast["cost"][1], rel=2e-3)
    assert fast["tokens_max_over_mean"] == 1.0
    run = run_tool("--lengths", "5", "--cp", "2", "--speeds", "1,1,1")
    assert "rank_speeds are given for 3 ranks, but cp_size=2" in run.stderr
    run = run_tool("--lengths", "5", "--cp", "4", "--ranks-per-node", "3")
    assert "ranks_per_node=3 must divide cp_size=4" in run.stderr


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for name, options in (("queries.png", EXAMPLE), ("keys.png", PACK)):
        path = tmp_path / name
        run = run_tool(*options, "--plot", str(path))
        assert run.returncode == 0, run.stderr
        assert path.read_bytes().startswith(b"\x89PNG")
    run = run_tool(*EXAMPLE, "--plot", str(tmp_path / "plan.nonsense"))
    assert run.returncode == 2
    assert "nonsense" in run.stderr
