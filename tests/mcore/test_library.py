"""The library without the launcher: a hand-built GPT, its own spec, batch and rotary embedding.

Two real gloo ranks hold the model; the reference is the stock model on one rank: Megatron's own
`DotProductAttention`. Also: books and microbatches that must not disturb each other.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.plan import Plan, Window
from tests.gloo import run_gloo
from tests.mcore.jobs import ROOT
from tests.tolerances import FP32

VOCABULARY, LENGTH, BATCH = 64, 48, 2


@contextmanager
def megatron_groups() -> Iterator[tuple[object, object]]:
    """CPU mode and Megatron's groups; yields collections of all ranks as cp, and of one rank."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_splitkv.mcore import cpu_mode

    cpu_mode.install()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    try:
        whole = ProcessGroupCollection.use_mpu_process_groups()
        alone = ProcessGroupCollection.use_mpu_process_groups()
        alone.cp = whole.tp  # a group of this rank only
        yield whole, alone
    finally:
        parallel_state.destroy_model_parallel()
        cpu_mode.uninstall()


def build_model(groups, book=None, *, wraps_rotary=True, **settings):
    """A toy GPT with the stock attention, or with Split-KV if it gets a book."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_splitkv.mcore.rotary import wrap_rotary
    from megatron_splitkv.mcore.spec import apply_to_spec

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, inference_rng_tracker=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        normalization="RMSNorm", context_parallel_size=1 if book is None else dist.get_world_size(),
        **settings,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec if book is None else apply_to_spec(spec, book),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    if book is not None and wraps_rotary:
        wrap_rotary(model, book)
    return model


def make_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(BATCH, LENGTH, generator=generator) < 0.8).float(),
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1).contiguous(),
    }


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor], packed=None) -> Tensor:
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        packed_seq_params=packed,
    )  # fmt: skip
    return (losses * batch["loss_mask"]).sum()


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients, taken out of the model."""
    taken = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return taken


def check_model_against_stock(settings: dict) -> None:
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, alone):
        batch = make_batch(1)
        stock = build_model(alone, **settings)
        expected_loss = loss_of(stock, batch)
        expected_loss.backward()
        expected = gradients_of(stock)

        book = PlanBook(SplitKVConfig())
        model = build_model(whole, book, **settings)
        loss = loss_of(model, shard_batch(batch, whole.cp, book))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total / expected_loss - 1) < 1e-6
        for name, gradient in gradients_of(model).items():
            dist.all_reduce(gradient)
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error <= FP32.rel_l2, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    "settings",
    [{}, {"window_size": (7, 0)}, {"window_size": (7, 0), "window_attn_skip_freq": 2},
     {"softmax_type": "off-by-one"}, {"apply_query_key_layer_scaling": True}],
    ids=["causal", "window", "window-and-full", "off-by-one", "layer-scaling"],
)  # fmt: skip
def test_hand_built_model_equals_the_stock_one(settings: dict) -> None:
    run_gloo(2, check_model_against_stock, settings)


def packed_params(ends: Tensor):
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int((ends[1:] - ends[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


def check_packed_model(lengths: list[int]) -> None:
    """Packed documents of one sequence equal the stock model on each document alone."""
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.library import follow_plans
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, alone):
        batch = {key: tensor[:1] for key, tensor in make_batch(1).items()}
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        stock = build_model(alone)
        for begin, end in pairwise(ends.tolist()):
            document = {key: tensor[:, begin:end] for key, tensor in batch.items()}
            document["position_ids"] = torch.arange(end - begin)[None]
            if end > begin:
                loss_of(stock, document).backward()
        expected = gradients_of(stock)

        book = PlanBook(SplitKVConfig())
        installation = follow_plans(book)
        model = build_model(whole, book, wraps_rotary=False)
        sharded = shard_batch(batch | {"cu_seqlens": ends[None]}, whole.cp, book)
        loss_of(model, sharded, packed_params(ends)).backward()
        for name, gradient in gradients_of(model).items():
            dist.all_reduce(gradient)
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error <= FP32.rel_l2, f"{name}: {error:.2e}"
        installation.uninstall()


@pytest.mark.parametrize("lengths", [[48], [30, 0, 1, 17], [1] * 48], ids=str)
def test_packed_documents_equal_the_stock_model_on_each_alone(lengths: list[int]) -> None:
    run_gloo(2, check_packed_model, lengths)


def check_kept_memory() -> None:
    """Beside what attention keeps for backward there is nothing in the memory that it keeps."""
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        book = PlanBook(SplitKVConfig())
        model = build_model(whole, book)
        batch = {key: tensor[:1] for key, tensor in make_batch(1).items()}
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            loss_of(model, shard_batch(batch, whole.cp, book))
        shapes = {(LENGTH // 2, heads, 8) for heads in (2, 4)}
        kept = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
        assert len(kept) == 2 * 4, "q, k, v and out of two layers"
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


def test_keys_and_values_do_not_keep_the_fused_projection() -> None:
    run_gloo(2, check_kept_memory)


def test_tensors_that_fill_their_memory_together_stay_as_they_are() -> None:
    from megatron_splitkv.mcore.module import without_company

    fused = torch.randn(6, 12, 8)
    together = fused.split([4, 4, 4], dim=1)
    assert all(a is b for a, b in zip(without_company(*together), together, strict=True))
    got = without_company(*together[1:])
    for copy, tensor in zip(got, together[1:], strict=True):
        assert copy.untyped_storage().nbytes() == tensor.nbytes
        assert torch.equal(copy, tensor)


def check_refusals() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_splitkv.errors import UnsupportedError
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        book = PlanBook(SplitKVConfig())
        model = build_model(whole, book)
        batch = {key: tensor[:1] for key, tensor in make_batch(1).items()}
        ends = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
        sharded = shard_batch(batch | {"cu_seqlens": ends[None]}, whole.cp, book)
        with pytest.raises(UnsupportedError, match="packed_seq_params with wrap_rotary"):
            loss_of(model, sharded, packed_params(ends))
        attention = model.decoder.layers[0].self_attention.core_attention
        q = torch.zeros(LENGTH // 2, 4, 8)
        k = v = torch.zeros(LENGTH // 2, 2, 8)
        with pytest.raises(UnsupportedError, match=r"no_mask in a call of a layer built with"):
            attention(q[:, None], k[:, None], v[:, None], None, AttnMaskType.no_mask)
        other = packed_params(ends)
        other.cu_seqlens_kv = torch.tensor([0, 21, LENGTH], dtype=torch.int32)
        with pytest.raises(UnsupportedError, match="cu_seqlens_kv unlike cu_seqlens_q"):
            attention(q, k, v, None, packed_seq_params=other)
        with pytest.raises(UnsupportedError, match=r"window_size=\(-1, 0\)"):
            build_model(whole, book, window_size=(-1, 0))
        with pytest.raises(UnsupportedError, match=r"mtp_num_layers=1 .*follow_plans"):
            build_model(whole, book, mtp_num_layers=1)


def test_what_would_be_wrong_in_silence_is_refused() -> None:
    run_gloo(2, check_refusals)


def check_all_labels_masked() -> None:
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        book = PlanBook(SplitKVConfig())
        model = build_model(whole, book)
        batch = make_batch(1)
        batch["loss_mask"].zero_()
        loss = loss_of(model, shard_batch(batch, whole.cp, book))
        loss.backward()
        assert loss == 0
        assert all(not gradient.any() for gradient in gradients_of(model).values())


def test_a_batch_without_labels_has_loss_and_gradients_zero() -> None:
    run_gloo(2, check_all_labels_masked)


def check_microbatches_in_flight(packs: tuple[list[int], list[int]] | None) -> None:
    """F0 F1 B0 B1 and F0 F1 B1 B0 give bitwise the gradients of each microbatch in a run alone."""
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.library import follow_plans
    from megatron_splitkv.mcore.plans import PlanBook

    def gradients_in(order: tuple[int, ...]) -> dict[int, dict[str, Tensor]]:
        """Forward in the order of the microbatches, backward in `order`, under a new book."""
        book = PlanBook(SplitKVConfig())
        installation = follow_plans(book)
        model = build_model(whole, book, wraps_rotary=False)
        sharded = {index: shard_batch(batches[index], whole.cp, book) for index in sorted(order)}
        losses = {index: loss_of(model, sharded[index], params[index]) for index in sharded}
        got = {}
        for index in order:
            losses[index].backward()
            got[index] = gradients_of(model)
        installation.uninstall()
        return got

    with megatron_groups() as (whole, _):
        batches, params = [make_batch(1), make_batch(2)], [None, None]
        batches[1] = {key: tensor[:, : LENGTH // 4] for key, tensor in batches[1].items()}
        if packs is not None:
            ends = [torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in packs]
            params = [packed_params(cu_seqlens) for cu_seqlens in ends]
            batches = [
                {key: tensor[:1] for key, tensor in make_batch(seed).items()}
                | {"cu_seqlens": cu_seqlens}
                for seed, cu_seqlens in enumerate(ends)
            ]
        alone = gradients_in((0,)) | gradients_in((1,))
        for order in ((0, 1), (1, 0)):
            for index, gradients in gradients_in(order).items():
                for name, gradient in gradients.items():
                    assert torch.equal(gradient, alone[index][name]), (order, name)


@pytest.mark.parametrize("packs", [None, ([30, 18], [3, 45])], ids=["unpacked", "packed"])
def test_microbatches_in_flight_keep_their_plans(packs) -> None:
    run_gloo(2, check_microbatches_in_flight, packs)


def check_two_models() -> None:
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        books = PlanBook(SplitKVConfig()), PlanBook(SplitKVConfig(num_stages=1), Window(8))
        settings = {}, {"window_size": (7, 0)}
        models = [
            build_model(whole, book, **extra) for book, extra in zip(books, settings, strict=True)
        ]
        batches = [shard_batch(make_batch(3), whole.cp, book) for book in books]
        assert not torch.equal(batches[0]["tokens"], batches[1]["tokens"]), "placements are alike"
        alone = []
        for model, batch in zip(models, batches, strict=True):
            loss_of(model, batch).backward()
            alone.append(gradients_of(model))
        losses = [loss_of(model, batch) for model, batch in zip(models, batches, strict=True)]
        for loss in losses:
            loss.backward()
        for model, isolated in zip(models, alone, strict=True):
            for name, gradient in gradients_of(model).items():
                assert torch.equal(gradient, isolated[name]), name


def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    run_gloo(2, check_two_models)


def check_different_documents() -> str:
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        ends = torch.tensor([0, 10 + dist.get_rank(), 32], dtype=torch.int32)
        with pytest.raises(ValueError, match="fed the same documents") as caught:
            PlanBook(SplitKVConfig()).packed(ends, whole.cp)
        return str(caught.value)


def test_ranks_fed_different_documents_get_one_error() -> None:
    first, second = run_gloo(2, check_different_documents)
    assert first == second


def check_reused_buffer() -> None:
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        book = PlanBook(SplitKVConfig(check_plan="always"))
        ends = torch.tensor([0, 10, 32], dtype=torch.int32)
        assert book.packed(ends, whole.cp).doc_lens == (10, 22)
        assert book.packed(ends[None].squeeze(0), whole.cp).doc_lens == (10, 22)
        ends[1] = 12  # the next microbatch in the same buffer
        assert book.packed(ends, whole.cp).doc_lens == (12, 20)
        both = torch.tensor([[0, 10, 32], [0, 16, 32]], dtype=torch.int32)  # rows of one tensor
        assert book.packed(both[0], whole.cp).doc_lens == (10, 22)
        assert book.packed(both[1], whole.cp).doc_lens == (16, 16)
        alone = PlanBook(SplitKVConfig())
        for step in range(200):
            ends[1] = 1 + step % 30
            alone.packed(ends, whole.cp)
        gc.collect()
        plans = sum(isinstance(thing, Plan) for thing in gc.get_objects())
        assert plans < 60, f"{plans} plans are remembered"


def test_a_buffer_that_is_used_again_is_read_again() -> None:
    run_gloo(2, check_reused_buffer)


def check_middle_stage() -> tuple[str, str]:
    """A stage without tokens derives its plan from cu_seqlens alone."""
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.plans import PlanBook

    with megatron_groups() as (whole, _):
        ends = torch.tensor([[0, 10, 32]], dtype=torch.int32)
        tokens = torch.arange(32)[None]
        first, middle = PlanBook(SplitKVConfig()), PlanBook(SplitKVConfig())
        sharded = shard_batch({"tokens": tokens, "cu_seqlens": ends}, whole.cp, first)
        plan = middle.packed(ends.clone().squeeze(0), whole.cp)
        context = middle.context(plan, whole.cp, torch.device("cpu"), plan.queries)
        assert torch.equal(sharded["tokens"][0], context.layout.kv_index)
        return first.packed(ends, whole.cp).fingerprint, plan.fingerprint


def test_middle_stages_derive_the_same_plan() -> None:
    for first, middle in run_gloo(2, check_middle_stage):
        assert first == middle


def check_example_loss(counts: list[int], sums: list[float]) -> float:
    """The mean that Megatron logs and differentiates: sums over ranks, then one division."""
    import importlib.util

    from megatron_splitkv.mcore import cpu_mode

    cpu_mode.install()
    script = ROOT / "examples" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("pretrain_gpt", script)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    count, total = counts[dist.get_rank()], sums[dist.get_rank()]
    mask = (torch.arange(8) < count).float()
    losses = torch.full((8,), total / max(count, 1)) + 100 * (1 - mask)
    loss, num_tokens, logged = example.loss_func(mask, losses)
    assert (loss.item(), num_tokens.item()) == (pytest.approx(total), count)
    both = logged["lm loss"].clone()
    dist.all_reduce(both)
    cpu_mode.uninstall()
    return (both[0] / both[1]).item()


def test_ranks_with_few_or_no_labels_share_one_mean() -> None:
    # 3.0 is the mean of the ranks' means, 1.5 counts the ranks without labels.
    for mean in run_gloo(4, check_example_loss, [5, 3, 0, 0], [10.0, 12.0, 0.0, 0.0]):
        assert mean == pytest.approx(2.75)
