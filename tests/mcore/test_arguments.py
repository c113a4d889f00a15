"""Our arguments on Megatron's parser: values, refusals and what they say."""

import argparse
import os
import shlex

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore import arguments, cpu_arguments, model_arguments
from megatron_splitkv.plan import Prefix

BASE = (
    "--context-parallel-impl splitkv --context-parallel-size 2 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 "
)
PACKED = "--dataloader-inter-document-masking "
PER_TOKEN = "--calculate-per-token-loss "


@pytest.fixture(scope="module")
def parser():
    megatron = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return arguments.add_splitkv_args(megatron)


@pytest.fixture
def parse(parser):
    return lambda extra="": parser.parse_args(shlex.split(BASE + extra))


def test_defaults_are_those_of_the_config(parse):
    assert arguments.splitkv_config_from_args(parse()) == SplitKVConfig()


def test_every_argument_reaches_the_config(parse):
    args = parse(
        "--splitkv-block-size 128 --splitkv-route keys --splitkv-stages 2 "
        "--splitkv-partial-dtype bf16 --splitkv-transport gloo "
        "--splitkv-keep-queries --splitkv-balance-tolerance 0.05 --splitkv-ranks-per-node 4 "
        "--splitkv-rank-speeds 1,0.5 "
        "--splitkv-check-plan always --splitkv-mtp-normalization megatron"
    )
    assert arguments.splitkv_config_from_args(args) == SplitKVConfig(
        block_size=128,
        route="keys",
        num_stages=2,
        partial_dtype="bf16",
        transport="gloo",
        keep_queries=True,
        balance_tolerance=0.05,
        ranks_per_node=4,
        rank_speeds=(1.0, 0.5),
        check_plan="always",
        mtp_normalization="megatron",
    )


GROUPED = "--num-attention-heads 8 --group-query-attention "


@pytest.mark.parametrize(
    ("extra", "route"),
    [
        (GROUPED + "--num-query-groups 2", "keys"),
        (GROUPED + "--num-query-groups 2 --window-size 16,0", "keys"),
        (GROUPED + "--num-query-groups 2 --splitkv-route queries", "queries"),
        (GROUPED + "--num-query-groups 2 --context-parallel-size 1", "queries"),
        # A rank gathers one KV head at a time: of 16 ranks as much as its own 8 q and 8 out.
        (GROUPED + "--num-query-groups 2 --context-parallel-size 16", "keys"),
        (GROUPED + "--num-query-groups 2 --context-parallel-size 32", "queries"),
        (GROUPED + "--num-query-groups 2 --context-parallel-size 16 --splitkv-stages 1", "queries"),
        # A tensor-parallel rank has four heads that read one, which makes one group.
        (GROUPED + "--num-query-groups 2 --context-parallel-size 8 --tensor-model-parallel-size 2",
         "keys"),
        (GROUPED + "--num-query-groups 2 --context-parallel-size 16 --tensor-model-parallel-size 2",
         "queries"),
        ("--num-attention-heads 8 --num-query-groups 2", "queries"),  # grouped only if it is said
        ("--num-attention-heads 8 --multi-latent-attention", "queries"),
        ("--num-attention-heads 8 --splitkv-route keys", "keys"),
    ],
)  # fmt: skip
def test_route_goes_by_heads_and_ranks(parse, extra, route):
    assert arguments.splitkv_config_from_args(parse(extra)).route == route


def test_queries_travel_where_a_checkpoint_brings_the_heads(parse):
    args = parse(GROUPED + "--num-query-groups 2")
    args.num_attention_heads = None
    assert arguments.splitkv_config_from_args(args).route == "queries"


def test_route_that_the_mask_has_not_is_refused(parse, monkeypatch):
    """No argument of Megatron's names such a mask yet."""
    monkeypatch.setattr(model_arguments, "placement_queries", lambda args: Prefix((4,)))
    message = r"--splitkv-route keys: route='keys' is for causal, .* take route 'queries'"
    with pytest.raises(ValueError, match=message):
        arguments.validate_splitkv_args(parse("--splitkv-route keys"))
    arguments.validate_splitkv_args(parse(GROUPED + "--num-query-groups 2"))


def test_default_implementation_is_megatron():
    assert arguments.requested_impl(["--lr", "1"]) == "megatron"
    assert arguments.requested_impl(["--context-parallel-impl", "splitkv"]) == "splitkv"
    assert arguments.requested_impl(["--context-parallel-impl=splitkv", "x"]) == "splitkv"


def test_unknown_implementation_is_one_line():
    with pytest.raises(ValueError, match=r"impl ring is unknown; choose one of megatron, splitkv"):
        arguments.requested_impl(["--context-parallel-impl", "ring"])


@pytest.mark.parametrize(
    ("backend", "num_ranks", "device", "says"),
    [("gloo", 4, 1, "4 ranks share 2 GPU"), ("gloo", 2, 3, None), ("nccl", 4, 3, None)],
)
def test_ranks_share_gpus_over_gloo_alone(parse, monkeypatch, backend, num_ranks, device, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    args = parse(f"--distributed-backend {backend}")
    args.local_rank = 3
    notes = arguments.validate_splitkv_args(args)
    assert args.local_rank == device
    assert any(says in note for note in notes) if says else not any("share" in x for x in notes)


def test_yaml_is_refused():
    with pytest.raises(UnsupportedError, match=r"--yaml-cfg run.yaml bypasses the checks"):
        arguments.check_command_line(["--yaml-cfg", "run.yaml"])
    arguments.check_command_line(["--lr", "1"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--splitkv-block-size 96", r"block_size=96 must be a positive multiple of 64 .* use 128"),
        (
            "--splitkv-partial-dtype int8",
            r"partial_dtype='int8' is unknown; choose one of auto, fp32",
        ),
        (
            "--splitkv-transport mpi",
            r"transport='mpi' is unknown; choose one of auto, nccl, symmetric, gloo",
        ),
        ("--splitkv-route kv", r"--splitkv-route kv is unknown; choose one of auto, queries, keys"),
        ("--splitkv-stages 0", r"num_stages=0 must be at least 1"),
        (
            "--splitkv-ranks-per-node 3",
            r"--splitkv-ranks-per-node=3 must divide --context-parallel-size=\d",
        ),
        ("--splitkv-ranks-per-node 0", r"ranks_per_node=0 must be at least 1"),
        ("--splitkv-rank-speeds 1,fast", r"--splitkv-rank-speeds=1,fast must be numbers between"),
        ("--splitkv-rank-speeds 1,0", r"rank_speeds=\(1.0, 0.0\) must be positive and finite"),
        ("--splitkv-rank-speeds 1,1,1", r"names 3 ranks, and --context-parallel-size=2 has 2"),
        ("--splitkv-balance-tolerance 2", r"balance_tolerance=2.0 must lie in \[0, 1\]"),
        ("--splitkv-check-plan never", r"check_plan='never' is unknown"),
        ("--context-parallel-impl ring", r"impl ring is unknown"),
        ("--context-parallel-size 3", r"of 2 \* --context-parallel-size \(3\) = 6, .* use 66"),
        (PACKED, r"packed documents with --context-parallel-size=2 needs --calculate-per-token"),
        ("--sft", r"packed documents .* add --calculate-per-token-loss"),
        ("--eod-mask-loss", r"--eod-mask-loss .* needs --calculate-per-token-loss"),
    ],
)
def test_bad_values(parse, extra, message):
    with pytest.raises(ValueError, match=message):
        arguments.validate_splitkv_args(parse(extra))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--attention-dropout 0.1", r"--attention-dropout=0.1 .* set --attention-dropout 0"),
        ("--hybrid-context-parallel", r"groups change with each microbatch; leave it out"),
        ("--hierarchical-context-parallel-sizes 1 2", r"one flat group"),
        ("--hybrid-layer-pattern M*M*", r"--hybrid-layer-pattern=M\*M\* .* attention layers only"),
        ("--hybrid-override-pattern M*", r"--hybrid-override-pattern=M\*"),
        ("--is-hybrid-model", r"--is-hybrid-model=True"),
        ("--experimental-attention-variant gated_delta_net", r"variant=gated_delta_net"),
        ("--experimental-attention-variant dsa", r"variant=dsa .* use softmax attention"),
        ("--heterogeneous-layers-config-path l.json", r"-config-path=l.json .* layers of one kind"),
        ("--heterogeneous-layers-config-encoded-json {}", r"-config-encoded-json={} does not work"),
        ("--reset-attention-mask", r"a dense mask .* use --dataloader-inter-document-masking"),
        ("--attention-backend local --spec local", r"--attention-backend=local .* leave it out"),
        ("--transformer-impl inference_optimized", r"use local or transformer_engine"),
        ("--use-kitchen-attention", r"it is another attention"),
        ("--qk-clip", r"--qk-clip=True .* maximum logits"),
        ("--log-max-attention-logit", r"--log-max-attention-logit=True"),
        ("--position-embedding-type relative", r"relative positions, alibi"),
        ("--cuda-graph-impl local", r"--cuda-graph-impl=local .* planned anew"),
        ("--cuda-graph-impl transformer_engine", r"--cuda-graph-impl=transformer_engine does not"),
        ("--cuda-graph-impl full_iteration", r"--cuda-graph-impl=full_iteration does not work"),
        ("--enable-cuda-graph", r"--enable-cuda-graph=True"),
        ("--external-cuda-graph", r"--external-cuda-graph=True"),
        ("--logits-load-dir d", r"--logits-load-dir=d .* order of tokens"),
        ("--logits-save-dir d", r"--logits-save-dir=d"),
        ("--perform-rl-step", r"--perform-rl-step=True"),
        (
            PACKED + PER_TOKEN + "--micro-batch-size 2 --num-experts 4 "
            "--moe-router-load-balancing-type seq_aux_loss",
            r"--micro-batch-size=2 .* use aux_loss, or --micro-batch-size 1",
        ),
        (
            PACKED + PER_TOKEN + "--micro-batch-size 2 --num-experts 4 "
            "--pipeline-model-parallel-size 2 --moe-token-dispatcher-type allgather",
            r"dispatcher-type=allgather .* use alltoall",
        ),
        (PACKED + PER_TOKEN + "--overlap-moe-expert-parallel-comm", r"drops the document bounds"),
    ],
)
def test_refusals_name_setting_value_and_way_out(parse, extra, message):
    with pytest.raises(UnsupportedError, match=message):
        arguments.validate_splitkv_args(parse(extra))


def test_fused_rotary_with_latent_attention_is_refused(parse):
    args = parse("--multi-latent-attention")
    args.apply_rope_fusion = True
    with pytest.raises(UnsupportedError, match=r"add --no-rope-fusion"):
        arguments.validate_splitkv_args(args)


@pytest.mark.parametrize(
    "extra",
    [
        "",
        PACKED + PER_TOKEN,
        "--sft " + PER_TOKEN,
        "--multi-latent-attention",
        "--context-parallel-size 1 --seq-length 63",
        "--eod-mask-loss --context-parallel-size 1",
        "--softmax-type learnable",
        "--window-size 16,0",
        PACKED + PER_TOKEN + "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss",
    ],
)
def test_what_works_is_let_through(parse, extra):
    arguments.validate_splitkv_args(parse(extra))


def test_switched_and_ignored_settings_are_named(parse):
    args = parse(PACKED + PER_TOKEN + "--cp-comm-type a2a --attention-backend flash")
    args.apply_rope_fusion = True
    notes = arguments.validate_splitkv_args(args)
    assert args.apply_rope_fusion is False
    text = "\n".join(notes)
    assert len(notes) == 3
    for part in (
        "set --no-rope-fusion",
        "ignoring --cp-comm-type a2a: queries travel",
        "ignoring --attention-backend flash",
    ):
        assert part in text


def test_dense_mask_of_the_dataloader_is_switched_off(parse):
    args = parse()
    notes = arguments.validate_splitkv_args(args)
    assert args.create_attention_mask_in_dataloader is False
    assert [note.split(":")[0] for note in notes] == [
        "set --no-create-attention-mask-in-dataloader"
    ]


def test_adding_arguments_twice_adds_them_once(parser):
    before = len(parser._actions)
    assert arguments.add_splitkv_args(parser) is parser
    assert len(parser._actions) == before


@pytest.mark.parametrize(
    ("has_gpu", "has_te", "missing"),
    [
        (False, True, "no CUDA device; use"),
        (True, False, "no transformer-engine; use"),
        (False, False, "no CUDA device and no transformer-engine; use"),
        (True, True, None),
    ],
)
def test_stock_context_parallelism_needs_a_gpu(parse, monkeypatch, has_gpu, has_te, missing):
    monkeypatch.setattr(arguments.torch.cuda, "is_available", lambda: has_gpu)
    found = object() if has_te else None
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: found)
    args = parse("--context-parallel-impl megatron")
    if missing is None:
        arguments.check_stock_context_parallelism(args)
    else:
        with pytest.raises(UnsupportedError, match=missing) as caught:
            arguments.check_stock_context_parallelism(args)
        for part in (
            "--context-parallel-size=2 with --context-parallel-impl megatron",
            "needs transformer-engine and a GPU",
            "use --context-parallel-size 1 or --context-parallel-impl splitkv",
        ):
            assert part in str(caught.value)
    args.context_parallel_size = 1
    arguments.check_stock_context_parallelism(args)


def test_every_argument_has_help_with_its_default(parser):
    ours = [a for a in parser._actions if any("--splitkv-" in o for o in a.option_strings)]
    assert len(ours) == 12
    assert all("default" in (action.help or "") for action in ours)


def test_cpu_settings_change_and_are_named(parse):
    args = parse("--transformer-impl local --overlap-grad-reduce")
    changed = cpu_arguments.apply_cpu_settings(args)
    for setting in cpu_arguments.CPU_SETTINGS:
        assert getattr(args, setting.name) == setting.value
    assert "--distributed-backend gloo" in changed
    assert "--transformer-impl local" not in changed, "it was given"
    assert args.overlap_grad_reduce is True, "what works is left alone"
    assert cpu_arguments.apply_cpu_settings(args) == []


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--fp8-format e4m3", r"--fp8-format=e4m3 needs a GPU"),
        ("--cuda-graph-impl local", r"--cuda-graph-impl=local needs a GPU"),
        ("--use-megatron-fsdp", r"--use-megatron-fsdp=True needs a GPU"),
        ("--moe-token-dispatcher-type flex", r"--moe-token-dispatcher-type=flex needs a GPU"),
    ],
)
def test_what_has_no_cpu_form_is_refused(parse, extra, message):
    with pytest.raises(UnsupportedError, match=message):
        cpu_arguments.apply_cpu_settings(parse(extra))


@pytest.mark.parametrize(
    ("cores", "processes", "given", "expected"),
    [
        (8, "2", None, 4),
        (8, "2", "", 4),
        (8, "2", "1", 4),  # torchrun's own
        (8, "2", "3", 3),
        (8, "2", "16", 4),
        (2, "4", None, 1),
        (6, None, None, 6),
    ],
)
def test_cores_are_shared(monkeypatch, cores, processes, given, expected):
    threads = []
    monkeypatch.setattr(cpu_arguments, "_num_cores", lambda: cores)
    monkeypatch.setattr(cpu_arguments.torch, "set_num_threads", threads.append)
    for name, value in (("LOCAL_WORLD_SIZE", processes), ("OMP_NUM_THREADS", given)):
        monkeypatch.setenv(name, value or "")  # so that it is put back, whatever is set below
        if value is None:
            monkeypatch.delenv(name)
    assert cpu_arguments.share_cores() == expected
    assert threads == [expected]
    assert os.environ["OMP_NUM_THREADS"] == str(expected)


def test_cpu_line_is_loud_and_complete():
    line = cpu_arguments.cpu_mode_line(["--a", "--b"], num_processes=2, num_threads=1)
    assert "CPU MODE" in line
    assert "2 gloo processes x 1 thread per process; set for this: --a, --b" in line
    assert "\n" not in line
