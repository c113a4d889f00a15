"""Pretrains a GPT with Megatron's own loop: datasets, batches and the loss, nothing else.

This is an ordinary Megatron script. It does not know which context parallelism is active: the
launcher decides that. See `long_context_gpt.sh` for a command that runs it.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_hybrid_data_context_parallel_groups,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

Batch = dict[str, Tensor | None]
KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def get_batch(data_iterator: Iterator[Batch], vp_stage: int | None) -> Batch:
    """One microbatch, or this rank's part of it.

    The first and last pipeline stages get tokens, labels and the rest. A middle stage gets document
    lengths only, and only if documents are packed.

    Args:
        data_iterator: yields microbatches on tensor-parallel rank 0.
        vp_stage: virtual pipeline stage of the calling model chunk.
    Returns:
        Every key of `KEYS`; None where this stage has no such tensor. `tokens`, `labels` and
        `position_ids` are int64, `loss_mask` fp32, all `[b, s / cp]`; `cu_seqlens` is int32
        `[1, documents + 1]` over the whole sequence, and then b is 1 and s counts all of them.
    """
    args = get_args()
    has_tokens = is_first_or_last_pipeline_stage(vp_stage) or has_mtp(vp_stage)
    is_packed = args.dataloader_inter_document_masking
    if not has_tokens and not is_packed:
        return dict.fromkeys(KEYS)

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        loaded = next(data_iterator)
        for key in KEYS:
            value = loaded.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=is_packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not has_tokens:
        return {**dict.fromkeys(KEYS), **{k: batch[k] for k in KEYS if "seqlen" in k}}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=get_context_parallel_group(),
        hybrid_cp_group_func=get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=is_packed,
    )


def packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    """Document bounds in Megatron's form, or None if each sequence is one document."""
    cu_seqlens, max_seqlen = batch["cu_seqlens"], batch["max_seqlen"]
    if cu_seqlens is None or max_seqlen is None:
        return None
    cu_seqlens = cu_seqlens.squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)
    longest = int(max_seqlen.item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses of this rank, the number of tokens in it, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    logged = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": logged}


def forward_step(
    data_iterator: Iterator[Batch], model: GPTModel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """One forward pass of one microbatch; Megatron's schedules call it."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    documents = packed_seq_params(batch)
    timer.stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=documents,
    )
    return output, partial(loss_func, batch["loss_mask"])


def has_mtp(vp_stage: int | None) -> bool:
    """Whether this stage holds a multi-token-prediction layer, which needs tokens of its own."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def builds_dataset(vp_stage: int | None) -> bool:
    """Whether this rank reads data; with packed documents every stage needs their lengths."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    packed = get_args().dataloader_inter_document_masking
    return packed or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(vp_stage)


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Dataset settings from Megatron's arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Training, validation and test datasets with the given numbers of sequences."""
    return BlendedMegatronDatasetBuilder(
        GPTDataset,
        num_samples,
        partial(builds_dataset, vp_stage=vp_stage),
        dataset_config(get_args()),
    ).build()


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold word embeddings: the first, and the last if they are shared."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def main() -> None:
    """Parses Megatron's command line and trains."""
    args = parse_and_validate_args()
    build_datasets.is_distributed = True  # Megatron then calls it on every rank
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":  # checkpoint workers import this file again
    main()
