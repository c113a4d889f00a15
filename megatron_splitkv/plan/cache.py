"""`PlanCache`: plans that are remembered while they fit a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from megatron_splitkv.plan.plan import Plan


class PlanCache:
    """Plans by key, the least recently used forgotten first.

    Planning is a pure function, so forgetting changes no result, only the time to plan again. The
    last plan stays, however large it is.

    Args:
        max_bytes: what the plans may hold together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> tuple[Plan, bool]:
        """The plan of `key`, and whether it had to be made."""
        is_new = key not in self._plans
        if is_new:
            plan = make()
            self._plans[key] = plan
            self.num_bytes += plan.nbytes
        self._plans.move_to_end(key)
        while self.num_bytes > self.max_bytes and len(self._plans) > 1:
            self.num_bytes -= self._plans.popitem(last=False)[1].nbytes
        return self._plans[key], is_new

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forgets all plans."""
        self._plans.clear()
        self.num_bytes = 0
