"""Planning in plain integers: documents -> KV blocks -> costs -> placement. Never imports torch."""

from megatron_splitkv.plan.cache import PlanCache
from megatron_splitkv.plan.exchange import RowExchange, StageRows, plan_exchange
from megatron_splitkv.plan.key_exchange import (
    KeyExchange,
    num_head_groups,
    plan_key_exchange,
    travelling_rows,
)
from megatron_splitkv.plan.plan import Machine, Plan, make_plan, plan_from_json
from megatron_splitkv.plan.planner import Planner, Timing
from megatron_splitkv.plan.queries import (
    Anchors,
    Causal,
    Full,
    Prefix,
    Queries,
    Suffix,
    Window,
    is_self_attention,
)
from megatron_splitkv.plan.route import check_route
from megatron_splitkv.plan.route_choice import choose_route

__all__ = [
    "Anchors",
    "Causal",
    "Full",
    "KeyExchange",
    "Machine",
    "Plan",
    "PlanCache",
    "Planner",
    "Prefix",
    "Queries",
    "RowExchange",
    "StageRows",
    "Suffix",
    "Timing",
    "Window",
    "check_route",
    "choose_route",
    "is_self_attention",
    "make_plan",
    "num_head_groups",
    "plan_exchange",
    "plan_from_json",
    "plan_key_exchange",
    "travelling_rows",
]
