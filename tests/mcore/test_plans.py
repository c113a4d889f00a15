"""What a book of plans hands to the layers of a model besides plans."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megatron_splitkv.comm import HostStagedTransport, ProcessGroupTransport, SymmetricTransport
from megatron_splitkv.config import SplitKVConfig
from megatron_splitkv.mcore import plans as plans_module
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.plan import Causal, Machine, Plan, Planner, Prefix, Window, make_plan
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


PACKS = ([500, 300, 224], [700, 100, 100, 124])


class PlannedPacks(Dataset[tuple[Tensor, Plan]]):
    """Packs whose plans a worker makes."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def __len__(self) -> int:
        return len(PACKS)

    def __getitem__(self, index: int) -> tuple[Tensor, Plan]:
        assert get_worker_info() is not None
        return torch.tensor([0, *PACKS[index]]).cumsum(0).int(), self.planner(PACKS[index])


CHECKED = SplitKVConfig(block_size=64, check_plan="always")


def takes_plans(batches: list[tuple[Tensor, Plan]]) -> list[bool]:
    """Whether the second rank takes plans that were made before; the first makes its own."""
    book, group = PlanBook(CHECKED), dist.group.WORLD
    found: list[bool] = []
    for ends, plan in batches:
        if dist.get_rank() == 1:
            book.remember(plan)
        found.append(book.packed(ends, group) is plan)
    return found


def test_plans_of_a_worker_reach_training():
    planner = PlanBook(CHECKED).planner(cp_size=2)
    batches = list(DataLoader(PlannedPacks(planner), batch_size=None, num_workers=1))
    assert [plan for _, plan in batches] == [planner(lens) for lens in PACKS]
    assert run_gloo(2, takes_plans, batches) == [[False, False], [True, True]]


def test_plan_of_another_mask_is_not_remembered():
    plan = Planner(cp_size=2, queries=Window(64))([512])
    message = "a plan of Window(size=64) is not of this run, which places Causal(); make it with"
    with pytest.raises(ValueError, match=re.escape(message)):
        PlanBook().remember(plan)


def test_plan_of_another_block_size_is_not_remembered():
    plan = Planner(cp_size=2, config=SplitKVConfig(block_size=128))([512])
    book = PlanBook(SplitKVConfig(block_size=64))
    with pytest.raises(ValueError, match="block_size=128 is not of this run, which has block_si"):
        book.remember(plan)
    PlanBook(SplitKVConfig(block_size=128)).remember(plan)


def test_plan_of_another_route_is_not_remembered():
    plan = Planner(cp_size=2, config=SplitKVConfig(route="keys"))([512])
    message = "a plan with route='keys' is not of this run, which has route='queries'; make it with"
    with pytest.raises(ValueError, match=message):
        PlanBook().remember(plan)
    PlanBook(SplitKVConfig(route="keys")).remember(plan)


def test_a_book_of_a_mask_without_the_route_is_refused():
    with pytest.raises(ValueError, match="route='keys' is for causal, window and full"):
        PlanBook(SplitKVConfig(route="keys"), Prefix((3,)))


def test_plan_with_pads_of_its_own_is_not_remembered():
    plan = make_plan([500], 2, padded_lens=[512])
    with pytest.raises(ValueError, match="a plan with padded_lens of its own is not of this run"):
        PlanBook().remember(plan)


@pytest.mark.parametrize(
    ("transport", "device", "name"),
    [
        (None, "cuda", "none"),
        (SymmetricTransport, "cuda", "symmetric"),
        (ProcessGroupTransport, "cuda", "nccl"),
        (HostStagedTransport, "cuda", "gloo"),
        (ProcessGroupTransport, "cpu", "gloo"),
    ],
)
def test_transports_are_named_as_they_were_chosen(monkeypatch, transport, device, name):
    made = None if transport is None else object.__new__(transport)
    monkeypatch.setattr(plans_module, "transport_of", lambda group, device, choice: made)
    assert PlanBook().transport_name("group", torch.device(device)) == name
