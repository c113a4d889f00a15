"""The launcher: what it refuses, what it changes, and runs from start to end."""

import importlib
import sys
from functools import reduce

import pytest
import torch

import megatron_splitkv._kernels as _kernels
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import hook_table, launch, upstream_fixes
from megatron_splitkv.mcore.session import Session, startup_line
from megatron_splitkv.plan import make_plan
from megatron_splitkv.plan.report import AttentionShape
from tests.mcore import jobs

PACKED = "--dataloader-inter-document-masking"
BLOCK_MASK = "--reset-position-ids --reset-attention-mask"
TOY = [
    *("--num-layers", "2", "--seq-length", "64", "--train-iters", "1"),
    *("--micro-batch-size", "1", "--global-batch-size", "1"),
]
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="module")
def reference(text_data, tmp_path_factory):
    """One process, Megatron's own attention, documents kept apart by a dense mask."""
    return jobs.train(tmp_path_factory.mktemp("job"), text_data, BLOCK_MASK, impl="megatron")


def line(log, start):
    """The one line of a log that starts so."""
    (found,) = [line for line in log.splitlines() if line.startswith(start)]
    return found


def gradients_agree(run, expected):
    """Whether two runs with equally named weights have equal first-step gradients, to fp32."""
    got, want = run.gradients(), expected.gradients()
    assert got.keys() == want.keys()
    return all(rel_l2(got[name], want[name]) <= 1e-5 for name in want)


def rel_l2(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def test_without_a_script_it_says_how():
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_splitkv.launch SCRIPT"):
        launch.main([])


def test_missing_script():
    with pytest.raises(ValueError, match=r"script no_such.py does not exist"):
        launch.main(["no_such.py"])


@pytest.mark.parametrize("found", ["0.18.2", "0.20.0", "1.0"])
def test_other_megatron_versions_are_refused(found):
    message = rf"megatron-core {found} is installed; .* pip install megatron-core==0.19.2"
    with pytest.raises(UnsupportedError, match=message):
        launch.check_megatron_version(found)


def test_tested_megatron_version_is_taken():
    launch.check_megatron_version("0.19.2")


def replaced_names():
    """What stands at each name that a run under Split-KV replaces, by module and name."""
    table = hook_table.splitkv_replacements(Session()) + upstream_fixes.packed_replacements()
    table.append(launch.Launcher("splitkv")._step_hook())
    names = {}
    for item in table:
        home, _, path = item.target.partition(":")
        for module in (home, *item.also):
            names[module, path] = reduce(getattr, path.split("."), importlib.import_module(module))
    return names


@pytest.mark.parametrize("impl", ["megatron", "splitkv"])
def test_install_touches_context_parallelism_only_if_asked(impl):
    before = replaced_names()
    launcher = launch.Launcher(impl)
    try:
        launcher.install([])
        during = replaced_names()
        changed = {name: during[name] is not before[name] for name in before}
        assert len(changed) >= 11
        assert changed == dict.fromkeys(before, impl == "splitkv")
    finally:
        launcher.uninstall()
    assert replaced_names() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without CUDA")
def test_script_sees_its_own_arguments_folder_and_name(tmp_path, capfd, monkeypatch):
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script.write_text(
        "import sys\nfrom beside import WORD\n"
        "if __name__ == '__main__':\n    print(WORD, sys.argv[1:])\n"
    )
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    launch.main([str(script), "--lr", "1"])
    assert "found ['--lr', '1']" in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without CUDA")
def test_cpu_run_says_so_and_learns(reference):
    said = line(reference.log, "splitkv: CPU MODE")
    assert "1 gloo process " in said
    assert "--distributed-backend gloo" in said
    losses = reference.losses["lm loss"]
    assert losses[-1] < losses[0]


def test_splitkv_says_what_is_active(text_data, tmp_path, reference):
    run = jobs.train(tmp_path, text_data, PACKED, cp=2)
    assert run.losses["lm loss"] == pytest.approx(reference.losses["lm loss"], rel=1e-5)
    said = line(run.log, "splitkv: impl=splitkv")
    settings = (
        "cp=2",
        "block_size=",
        "route=queries",
        "stages=1",
        "partial_dtype=fp32",
        "transport=gloo",
    )
    for part in (*settings, "imbalance=", "hooks=6"):
        assert part in said
    assert "fwd=0.00MB" not in said
    assert said.endswith("MB (first microbatch, summed over the context-parallel group)")


def test_startup_line_counts_exchanges_of_the_route():
    """Groups of KV heads where keys travel, stages of query rows elsewhere."""
    shape = AttentionShape(
        num_heads_q=8, num_heads_kv=4, head_dim_qk=64, head_dim_v=64, dtype="bf16"
    )
    for route, part in (("keys", "route=keys stages=2 "), ("queries", "route=queries stages=3 ")):
        config = SplitKVConfig(route=route, num_stages=3)
        plan = make_plan([4096], 4, route=route)
        said = startup_line(plan, shape, config, transport="nccl", num_hooks=6)
        assert f" {part}partial_dtype=fp16 " in said
        assert "fwd=0.00MB" not in said


def test_sequence_parallel_norms(text_data, tmp_path, reference):
    """Megatron's fallback norm refuses this; the gradients of ours are summed over the ranks."""
    arguments = (
        f"{BLOCK_MASK} --tensor-model-parallel-size 2 --sequence-parallel "
        "--make-vocab-size-divisible-by 2"  # as many padded ids as without tensor parallelism
    )
    run = jobs.train(tmp_path, text_data, arguments, impl="megatron", num_processes=2)
    assert run.losses["lm loss"] == pytest.approx(reference.losses["lm loss"], rel=1e-5)
    norms = {
        name.rpartition("/")[2]: value
        for name, value in run.gradients().items()
        if "layernorm" in name
    }
    expected = {name.rpartition("/")[2]: value for name, value in reference.gradients().items()}
    assert len(norms) >= 5
    for name, value in norms.items():
        assert rel_l2(value, expected[name]) <= 1e-5, name


def test_recomputation_with_hidden_dropout(text_data, tmp_path):
    """Masks are drawn anew in the backward pass, and must come out the same."""
    arguments = f"{PACKED} --hidden-dropout 0.2"
    kept = jobs.train(tmp_path / "kept", text_data, arguments)
    again = jobs.train(tmp_path / "again", text_data, f"{arguments} {RECOMPUTE}")
    assert again.losses == kept.losses
    assert gradients_agree(again, kept)


def test_packed_microbatches_pass_between_stages(text_data, tmp_path):
    """Without variable lengths the second stage fails; without its dataset the middle one does."""
    arguments = f"{PACKED} --pipeline-model-parallel-size 3 --num-layers 3 --micro-batch-size "
    one = jobs.train(tmp_path / "one", text_data, f"{arguments} 1", num_processes=3)
    two = jobs.train(tmp_path / "two", text_data, f"{arguments} 2", num_processes=3)
    assert two.losses["lm loss"] == pytest.approx(one.losses["lm loss"], rel=1e-5)


def test_bad_setting_ends_every_rank_with_one_message(text_data, tmp_path):
    arguments = ["--context-parallel-impl", "splitkv", "--context-parallel-size", "2", "--qk-clip"]
    code, log = jobs.launch([*jobs.MODEL, *TOY, *arguments], num_processes=2)
    assert code == 1
    said = [part for part in log.splitlines() if part.startswith("splitkv: rank")]
    texts = {part.partition("failed: ")[2] for part in said}
    assert len(said) == 2
    assert len(texts) == 1
    assert texts.pop().startswith("--qk-clip=True does not work with --context-parallel-impl")
    assert "initializing torch distributed" not in log, "before any group, data or model"
    assert "Traceback" not in log, "the message says it all"


def train_one_rank(text_data, tmp_path, extra, script=jobs.EXAMPLE):
    """Trains under Split-KV and returns exit code and log, whatever they are."""
    data = ["--data-path", str(text_data), "--data-cache-path", str(tmp_path / "cache")]
    saved = ["--save", str(tmp_path / "saved")]
    arguments = ["--context-parallel-impl", "splitkv", *saved, *extra.split()]
    return jobs.launch([*jobs.MODEL, *TOY, *data, *arguments], num_processes=1, script=script)


def test_a_function_that_was_never_called_is_an_error(text_data, tmp_path):
    """A script that cuts batches its own way trains on the wrong tokens; it ends by sys.exit."""
    own = jobs.EXAMPLE.read_text()
    own = own.replace("return get_batch_on_this_cp_rank(", "return (lambda batch, **kw: batch)(")
    script = tmp_path / "own_way.py"
    script.write_text(own)
    arguments = f"{PACKED} --train-iters 9 --exit-interval 2"
    code, log = train_one_rank(text_data, tmp_path, arguments, script)
    assert code == 1
    assert "the first training step never called megatron.core.utils:get_batch_on_this" in log
    assert "iteration        1/" not in log, "found before the first step was logged"
    assert not list(tmp_path.glob("saved/iter_*"))
    assert "Traceback" not in log


def test_attention_that_never_ran_is_an_error(text_data, tmp_path):
    """The spec asks the replaced provider for its attention, and then names another."""
    (tmp_path / "own_spec.py").write_text(
        "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec\n"
        "from megatron.core.transformer.dot_product_attention import DotProductAttention\n"
        "layer = get_gpt_layer_local_spec(normalization='RMSNorm')\n"
        "layer.submodules.self_attention.submodules.core_attention = DotProductAttention\n"
    )
    script = tmp_path / "script.py"
    script.write_text(jobs.EXAMPLE.read_text())
    code, log = train_one_rank(text_data, tmp_path, "--spec own_spec layer", script)
    assert code == 1
    assert "never called megatron_splitkv.mcore.module:SplitKVAttention.forward, so" in log


def test_a_finished_job_that_is_started_again_ends_well(text_data, tmp_path):
    arguments = f"{PACKED} --load {tmp_path / 'saved'}"
    code, log = train_one_rank(text_data, tmp_path, arguments)
    assert code == 0, log
    assert "was not checked" not in log
    code, log = train_one_rank(text_data, tmp_path, arguments)
    assert code == 0, log
    assert line(log, "splitkv: Megatron's train_step was not called").endswith("was not checked")


def test_exit_leaves_process_groups(tmp_path, monkeypatch):
    """As at the end of a script: else their threads may abort a run that succeeded."""
    script = tmp_path / "exits.py"
    script.write_text(
        "import sys, torch\n"
        f"torch.distributed.init_process_group('gloo', init_method='file://{tmp_path}/meet', "
        "rank=0, world_size=1)\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        launch.main([str(script)])
    assert ended.value.code == 3
    assert not torch.distributed.is_initialized()


def test_a_gpu_without_kernels_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(launch, "has_cuda_kernels", lambda: False)
    message = r"has NVIDIA H200 and .* no CUDA kernels.*; set CUDA_VISIBLE_DEVICES= .*impl megatron"
    launcher = launch.Launcher("splitkv")
    with pytest.raises(UnsupportedError, match=message):
        launcher.install([])
    monkeypatch.setattr(launch, "has_cuda_kernels", lambda: True)
    launch.check_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "has_cuda_kernels", lambda: False)
    launch.check_device()


def test_kernels_are_there_if_the_build_says_so(monkeypatch):
    for is_built in (True, False):
        monkeypatch.setattr(_kernels, "has_cuda_kernels", lambda is_built=is_built: is_built)
        assert launch.has_cuda_kernels() == is_built


def test_extra_arguments_of_the_script_may_be_ours(monkeypatch):
    """A script that works without the launcher passes them to Megatron itself."""
    from megatron.training import arguments as megatron_arguments

    from megatron_splitkv.mcore.arguments import add_splitkv_args

    launcher = launch.Launcher("megatron")
    try:
        launcher.install([])
        monkeypatch.setattr(sys, "argv", ["script", "--splitkv-stages", "3"])
        args = megatron_arguments.parse_args(extra_args_provider=add_splitkv_args)
    finally:
        launcher.uninstall()
    assert args.splitkv_stages == 3


def test_if_one_rank_fails_the_others_end(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\n"
        "torch.distributed.init_process_group('gloo')\n"
        "if torch.distributed.get_rank() == 1:\n"
        "    raise ValueError('broken on purpose')\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
    )
    code, log = jobs.launch([], num_processes=2, script=script, timeout_s=60)
    assert code == 1
    assert "splitkv: rank 1 of 2 failed: broken on purpose" in log
    assert "splitkv: rank 0 of 2 failed:" in log
    assert "TIMED OUT" not in log
