"""Document lengths of the samples that Megatron serves. Imports Megatron and torch."""

import logging
import tempfile
import warnings
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer


def first_samples(
    prefix: str, *, sequence_length: int, num_samples: int, num_packs: int, seed: int, split: str
) -> list[tuple[int, ...]]:
    """Lengths of the documents in each of the first training samples; see `packs_of_dataset`."""
    # Token values do not matter; the dataset asks for a pad and an end of document.
    tokenizers: Any = MegatronTokenizer
    tokenizer = tokenizers.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=257, _eos_id=256, _pad_id=-1
    )
    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([prefix], None),
            split=split,
            path_to_cache=cache,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            inter_document_masking=True,
        )
        builder = BlendedMegatronDatasetBuilder(
            GPTDataset, [num_samples, 0, 0], lambda: True, config
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = builder.build()[0]
        if dataset is None:
            raise ValueError(f"{prefix}: split={split} leaves no documents for training")
        packs: list[tuple[int, ...]] = []
        for i in range(min(num_packs, num_samples, len(dataset))):
            sample: Any = dataset[i]
            ends = np.unique(sample["cu_seqlens"].numpy())
            packs.append(tuple(np.diff(ends).tolist()))
    return packs
