"""What a book of plans hands to the layers of a model besides plans."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Causal, Window
from tests.gloo import run_gloo


def transports_of_layers() -> bool:
    """Whether layers of any mask and plan share one transport, until the book forgets it."""
    book, group, device = PlanBook(), dist.group.WORLD, torch.device("cpu")
    plans = [book.unpacked(length, 1, group, device) for length in (64, 128)]
    found = [
        book.context(plan, group, device, queries).transport
        for plan in plans
        for queries in (Causal(), Window(8))
    ]
    book.forget()
    renewed = book.transport(group, device)
    return len(set(map(id, found))) == 1 and renewed is not found[0]


def test_all_layers_share_one_transport():
    assert run_gloo(2, transports_of_layers) == [True, True]


def missing_backend() -> str:
    book = PlanBook(SplitKVConfig(transport="nccl"))
    with pytest.raises(ValueError, match="transport") as error:
        book.unpacked(64, 1, dist.group.WORLD, torch.device("cpu"))
    return str(error.value)


def test_a_missing_backend_is_refused_with_the_first_plan():
    message = "transport='nccl' needs a process group with that backend, got gloo"
    for said in run_gloo(2, missing_backend):
        assert re.match(message, said)
