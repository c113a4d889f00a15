"""A small Megatron GPT under Split-KV beside the same model on one rank: first step, gradients.

The reference is Megatron's own attention in fp32 without context parallelism; for packed documents
each document runs alone. Weights, tokens and labels are the same on every rank and in both models.
"""

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext
from megatron_splitkv.checks import limits
from megatron_splitkv.checks.counting import CountingTransport
from megatron_splitkv.checks.table import Check
from megatron_splitkv.comm import ProcessGroup, Transport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore import cpu_mode
from megatron_splitkv.mcore.batch import shard_batch
from megatron_splitkv.mcore.library import follow_plans
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.mcore.rotary import wrap_rotary
from megatron_splitkv.mcore.spec import apply_to_spec
from megatron_splitkv.plan import Plan, Queries
from megatron_splitkv.plan.report import AttentionShape, report_plan

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 64
VOCABULARY = 128
MAX_TOKENS_PER_RANK = 96

Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a first step gave: the summed loss, and the gradient of each weight, fp32."""

    loss: float
    gradients: Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a step is from the reference.

    Attributes:
        loss: relative.
        gradient: the largest relative L2 of any weight's gradient.
        worst: name of that weight.
        norm_ratio: norm of all gradients together over that of the reference.
    """

    loss: float
    gradient: float
    worst: str
    norm_ratio: float


def check_models(
    transport: Transport | None, device: torch.device, config: SplitKVConfig
) -> list[Check]:
    """Compares the model at `cp_size` with one rank: one document, and packed ones by each route.

    Every rank of the world calls it. Without a GPU, CPU mode is in force meanwhile.

    Args:
        transport: the context-parallel group, consecutive ranks of the world; None for one rank.
        device: of this rank; bf16 on a GPU, fp32 on the CPU.
        config: settings of Split-KV; both routes are tried, whichever it names.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cp_size = 1 if transport is None else transport.size
    with megatron_groups(cp_size) as (whole, alone):
        length = cp_size * max(8, min(MAX_TOKENS_PER_RANK, 512 // cp_size))
        packed = _pack_lens(length)
        checks: list[Check] = []
        for name, lens, route in (
            ("one document", [length], "queries"),
            ("packed documents", packed, "queries"),
            ("packed documents, keys travel", packed, "keys"),
        ):
            section = f"GPT in {str(dtype).removeprefix('torch.')}, cp {cp_size}, {name}"
            settings = replace(config, route=route)
            trial = _Trial((whole, alone), transport, lens, device, dtype, settings)
            checks += trial.checks(section)
    return checks


def _pack_lens(length: int) -> list[int]:
    """Documents of unequal lengths, an empty one and one of a single token among them."""
    return [length // 2 + 1, 0, 1, length - length // 2 - 2]


@contextmanager
def megatron_groups(
    cp_size: int,
) -> Generator[tuple[ProcessGroupCollection, ProcessGroupCollection]]:
    """Megatron's groups with all of `cp_size`, and the same with this rank alone as cp group."""
    is_cpu = cpu_mode.install()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    try:
        whole = ProcessGroupCollection.use_mpu_process_groups()
        alone = ProcessGroupCollection.use_mpu_process_groups()
        alone.cp = whole.tp  # a group of this rank only
        yield whole, alone
    finally:
        parallel_state.destroy_model_parallel()
        if is_cpu:
            cpu_mode.uninstall()


class _CountingBook(PlanBook):
    """A book whose contexts count what they send."""

    def __init__(self, config: SplitKVConfig) -> None:
        super().__init__(config)
        self.transports: list[CountingTransport] = []
        self._counted: dict[Hashable, SplitKVContext] = {}

    def context(
        self, plan: Plan, cp_group: ProcessGroup, device: torch.device, queries: Queries
    ) -> SplitKVContext:
        """As in `PlanBook`."""
        context = super().context(plan, cp_group, device, queries)
        if context.transport is None:
            return context
        key = (plan, cp_group, device, queries)
        if key not in self._counted:
            counting = CountingTransport(context.transport)
            self.transports.append(counting)
            self._counted[key] = SplitKVContext(
                layout=context.layout, transport=counting, config=context.config
            )
        return self._counted[key]


class _Trial:
    """One batch, through the reference and through Split-KV."""

    def __init__(
        self,
        groups: tuple[ProcessGroupCollection, ProcessGroupCollection],
        transport: Transport | None,
        doc_lens: list[int],
        device: torch.device,
        dtype: torch.dtype,
        config: SplitKVConfig,
    ) -> None:
        self.whole, self.alone = groups
        self.transport = transport
        self.doc_lens, self.device, self.dtype = doc_lens, device, dtype
        self.book = _CountingBook(config)
        self.ends = torch.tensor([0, *doc_lens]).cumsum(0).to(torch.int32)
        self.batch = _make_batch(doc_lens, device)

    @property
    def is_packed(self) -> bool:
        return len(self.doc_lens) > 1

    def checks(self, section: str) -> list[Check]:
        """Loss, gradients and their norm, and the bytes of the step."""
        reference = self.stock(torch.float32)
        got = self.split_kv()
        difference = _compare(got, reference)
        wire = limits.wire_limit(self.dtype, self.book.config).rel_l2
        loss_limit, gradient_limit = (
            limits.MODEL_FP32_LOSS + wire,
            limits.MODEL_FP32_GRADIENT + wire,
        )
        note = ""
        if self.dtype != torch.float32:
            noise = _compare(self.stock(self.dtype), reference).gradient
            loss_limit = limits.MODEL_BF16_LOSS
            gradient_limit = limits.MODEL_BF16_OVER_STOCK * noise
            note = f"against fp32; stock attention in bf16 {noise:.3g}"
        ratio = difference.norm_ratio
        return [
            Check(section=section, name="loss, relative to cp 1", value=difference.loss,
                  limit=loss_limit),
            Check(section=section, name="worst gradient, rel-L2 to cp 1",
                  value=difference.gradient, limit=gradient_limit,
                  note=note if difference.gradient <= gradient_limit else difference.worst),
            Check(section=section, name="gradient norm / that of cp 1 - 1", value=abs(ratio - 1),
                  limit=limits.MODEL_GRADIENT_NORM, note=_cause_of(ratio, self.whole.cp.size())),
            self._check_bytes(section),
        ]  # fmt: skip

    def stock(self, dtype: torch.dtype) -> Step:
        """The first step of the stock model on this rank alone, document by document."""
        model = _build_model(self.alone, None, self.device, dtype)
        total = 0.0
        for begin, end in pairwise(self.ends.tolist()):
            if end > begin:
                document = {key: tensor[:, begin:end] for key, tensor in self.batch.items()}
                loss = _loss_of(model, document)
                loss.backward()
                total += float(loss.detach())
        return Step(loss=total, gradients=_gradients_of(model))

    def split_kv(self) -> Step:
        """The first step under Split-KV, loss and gradients summed over the group."""
        installation = follow_plans(self.book) if self.is_packed else None
        try:
            model = _build_model(self.whole, self.book, self.device, self.dtype)
            if installation is None:
                wrap_rotary(model, self.book)
            packed, extra = None, {}
            if self.is_packed:
                ends = self.ends.to(self.device)
                packed, extra = _packed_params(ends, max(self.doc_lens)), {"cu_seqlens": ends[None]}
            batch = shard_batch({**self.batch, **extra}, self.whole.cp, self.book)
            loss = _loss_of(model, batch, packed)
            loss.backward()
        finally:
            if installation is not None:
                installation.uninstall()
        return _sum_over(
            self.transport,
            Step(loss=float(loss.detach()), gradients=_gradients_of(model)),
        )

    def _check_bytes(self, section: str) -> Check:
        """All layers together sent what the plan predicts for them."""
        sent = sum(transport.bytes_sent for transport in self.book.transports)
        group = self.whole.cp
        plan = (
            self.book.packed(self.ends.to(self.device), group)
            if self.is_packed
            else self.book.unpacked(self.doc_lens[0], 1, group, self.device)
        )
        shape = AttentionShape(
            num_heads_q=HEADS, num_heads_kv=KV_HEADS, head_dim_qk=HEAD_DIM, head_dim_v=HEAD_DIM,
            dtype=limits.DTYPE_NAMES[self.dtype],
        )  # fmt: skip
        report = report_plan(plan, shape, self.book.config)
        rank = group.rank()
        due = NUM_LAYERS * (report.bytes_forward[rank] + report.bytes_backward[rank])
        share = abs(sent - due) / due if due else float(sent > 0)
        return Check(
            section=section, name="bytes of all layers / predicted - 1", value=share,
            limit=limits.BYTES, note=f"{sent:,} bytes sent by a rank, {due:,} predicted",
        )  # fmt: skip


def _build_model(
    groups: ProcessGroupCollection,
    book: PlanBook | None,
    device: torch.device,
    dtype: torch.dtype,
) -> GPTModel:
    """The same weights each time, drawn on the CPU and rounded to bf16 for any dtype."""
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, inference_rng_tracker=True, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=NUM_LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS,
        num_query_groups=KV_HEADS, kv_channels=HEAD_DIM, attention_dropout=0.0,
        hidden_dropout=0.0, use_cpu_initialization=True, normalization="RMSNorm",
        masked_softmax_fusion=False, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True, context_parallel_size=groups.cp.size(),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec if book is None else apply_to_spec(spec, book),
        vocab_size=VOCABULARY,
        max_sequence_length=1 << 16,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    return model.to(torch.bfloat16).to(device=device, dtype=dtype)


def _make_batch(doc_lens: list[int], device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(doc_lens))
    length = sum(doc_lens)
    tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator)
    positions = torch.cat([torch.arange(size) for size in doc_lens])[None]
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(1, length, generator=generator) < 0.8).float(),
        "position_ids": positions,
    }
    return {key: tensor.to(device) for key, tensor in batch.items()}


def _packed_params(ends: Tensor, longest: int) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


def _loss_of(
    model: GPTModel, batch: dict[str, Tensor | None], packed: PackedSeqParams | None = None
) -> Tensor:
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"],
        packed_seq_params=packed,
    )  # fmt: skip
    return (losses.float() * batch["loss_mask"]).sum()


def _gradients_of(model: GPTModel) -> Gradients:
    return {
        name: weight.grad.float()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def _sum_over(transport: Transport | None, step: Step) -> Step:
    """The step of a whole group: each rank holds the share of its own tokens."""
    if transport is None:
        return step
    device = next(iter(step.gradients.values())).device
    loss = torch.tensor([step.loss], device=device)
    flat = torch.cat([loss, *(gradient.flatten() for gradient in step.gradients.values())])
    everyone = transport.all_gather(flat.view(torch.uint8)[None]).wait().view(torch.float32)
    total = everyone.view(transport.size, -1).double().sum(0).float()
    sizes = [1, *(gradient.numel() for gradient in step.gradients.values())]
    loss, *parts = total.split(sizes)
    return Step(
        loss=float(loss),
        gradients={
            name: part.view_as(gradient)
            for (name, gradient), part in zip(step.gradients.items(), parts, strict=True)
        },
    )


def _compare(got: Step, reference: Step) -> Difference:
    errors = {
        name: float((got.gradients[name] - due).norm() / due.norm())
        for name, due in reference.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    norms = [
        float(torch.stack([gradient.norm() for gradient in step.gradients.values()]).norm())
        for step in (got, reference)
    ]
    return Difference(
        loss=abs(got.loss / reference.loss - 1),
        gradient=errors[worst],
        worst=worst,
        norm_ratio=norms[0] / norms[1],
    )


def _cause_of(ratio: float, cp_size: int) -> str:
    """Names the likely cause of a ratio near the number of ranks or its inverse."""
    if cp_size > 1 and abs(ratio - cp_size) < 0.1 * cp_size:
        return f"near cp={cp_size}: gradients are counted once too often for each rank"
    if cp_size > 1 and abs(ratio * cp_size - 1) < 0.1:
        return f"near 1/cp={1 / cp_size:.3g}: gradients are averaged where they must be summed"
    return ""
