"""A toy GPT with the stock attention or Split-KV, without the launcher, and its batches."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCABULARY, LENGTH, BATCH = 64, 48, 2


def megatron_groups() -> AbstractContextManager[tuple[Any, Any]]:
    """Collections of all ranks as cp, and of this rank alone; in CPU mode where there is no GPU."""
    from megatron_splitkv.mcore import parity

    return parity.megatron_groups(dist.get_world_size())


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


def packed_params(ends: Tensor):
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int((ends[1:] - ends[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip
