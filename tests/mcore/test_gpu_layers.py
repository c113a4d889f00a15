"""A Megatron GPT on a GPU, in bf16: its layers do not wait for the host.

From tokens to logits and back: the loss after them reduces over the tensor-parallel group, which
is gloo's here and waits.
"""

import pytest
import torch
from torch import Tensor

from megatron_splitkv.config import SplitKVConfig
from tests.gloo import run_gloo
from tests.mcore.toy_model import (
    LENGTH,
    build_model,
    make_batch,
    megatron_groups,
    packed_params,
)

HEAD_DIM = 64  # there are no kernels for the toy model's own


def layers_of(model: torch.nn.Module, batch: dict[str, Tensor], packed: object) -> None:
    logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed)
    logits.backward(torch.ones_like(logits))


def check_no_host_sync(documents: list[int] | None) -> None:
    """The plan is made in the first step; the steps after it queue all their work and go on."""
    from megatron_splitkv.mcore.batch import shard_batch
    from megatron_splitkv.mcore.library import follow_plans
    from megatron_splitkv.mcore.plans import PlanBook

    torch.cuda.set_device(0)
    with megatron_groups() as (whole, _):
        book = PlanBook(SplitKVConfig())
        installation = follow_plans(book)
        settings = {"kv_channels": HEAD_DIM, "params_dtype": torch.bfloat16, "bf16": True}
        model = build_model(whole, book, wraps_rotary=False, **settings).cuda()
        batch = {key: tensor[:1].cuda() for key, tensor in make_batch(1).items()}
        packed = None
        if documents is not None:
            ends = torch.tensor([0, *documents]).cumsum(0).to(torch.int32).cuda()
            packed, batch = packed_params(ends), batch | {"cu_seqlens": ends[None]}
        batch = shard_batch(batch, whole.cp, book)
        try:
            layers_of(model, batch, packed)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            layers_of(model, batch, packed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            installation.uninstall()


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, [30, 1, LENGTH - 31]], ids=["unpacked", "packed"])
def test_layers_never_wait_for_the_host(documents) -> None:
    run_gloo(1, check_no_host_sync, documents)
