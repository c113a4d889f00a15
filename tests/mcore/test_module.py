"""What a layer keeps for its backward pass."""

import torch
from torch import Tensor

from megatron_splitkv.config import SplitKVConfig
from tests.gloo import run_gloo
from tests.mcore.toy_model import LENGTH, build_model, loss_of, make_batch, megatron_groups


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
    with torch.no_grad():
        assert without_company(*together[1:])[0] is together[1]
