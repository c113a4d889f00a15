"""Planning in plain integers: documents -> KV blocks -> costs -> placement. Never imports torch."""

from megatron_splitkv.plan.cache import PlanCache
from megatron_splitkv.plan.exchange import RowExchange, StageRows, plan_exchange
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

__all__ = [
    "Anchors",
    "Causal",
    "Full",
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
    "is_self_attention",
    "make_plan",
    "plan_exchange",
    "plan_from_json",
]
