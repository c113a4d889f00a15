"""What a book of plans hands to the layers of a model besides plans."""

import re

import pytest
import torch
import torch.distributed as dist

from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Causal, Machine, Window, make_plan
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


NODES = ([3000, 2000, 900, 800, 700, 500, 200, 92], 4)


def packed_by_nodes() -> bool:
    """Whether the book's plan is that of the configured nodes."""
    lens, cp_size = NODES
    book = PlanBook(SplitKVConfig(ranks_per_node=2))
    ends = torch.tensor([0, *lens]).cumsum(0).int()
    plan = book.packed(ends, dist.group.WORLD)
    return plan == make_plan(lens, cp_size, machine=Machine(ranks_per_node=2))


def test_nodes_of_the_configuration_reach_the_plan():
    lens, cp_size = NODES
    assert make_plan(lens, cp_size) != make_plan(lens, cp_size, machine=Machine(ranks_per_node=2))
    assert run_gloo(cp_size, packed_by_nodes) == [True] * cp_size


def plans_of_two_groups() -> bool:
    """Whether one pack has a plan of its own in each group, read from one tensor or from two."""
    book = PlanBook()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = (dist.group.WORLD, halves[dist.get_rank() // 2])
    ends = torch.tensor([0, 300, 512], dtype=torch.int32)
    same = [book.packed(ends, group).cp_size for group in groups]
    other = [book.packed(ends.clone(), group).cp_size for group in groups]
    alone = [book.unpacked(512, 1, group, torch.device("cpu")).cp_size for group in groups]
    return same == other == alone == [4, 2]


def test_groups_of_two_sizes_have_plans_of_their_own():
    assert run_gloo(4, plans_of_two_groups) == [True] * 4


def missing_backend() -> str:
    book = PlanBook(SplitKVConfig(transport="nccl"))
    with pytest.raises(ValueError, match="transport") as error:
        book.unpacked(64, 1, dist.group.WORLD, torch.device("cpu"))
    return str(error.value)


def test_a_missing_backend_is_refused_with_the_first_plan():
    message = "transport='nccl' needs a process group with that backend, got gloo"
    for said in run_gloo(2, missing_backend):
        assert re.match(message, said)
