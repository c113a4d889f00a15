"""What travels in an attention call: queries to the keys, or keys to the query rows."""

from megatron_splitkv.config import ROUTES
from megatron_splitkv.plan.queries import Causal, Full, Queries, Window


def has_route(route: str, queries: Queries) -> bool:
    """Whether a mask has a route."""
    return route == "queries" or isinstance(queries, Causal | Window | Full)


def check_route(route: str, queries: Queries) -> None:
    """Refuses a route that a mask has not.

    Raises:
        ValueError: the route is unknown, or keys are to travel to rows of context attention or of
            a prefix mask.
    """
    if route not in ROUTES:
        raise ValueError(f"route={route!r} is unknown; choose one of {', '.join(ROUTES)}")
    if not has_route(route, queries):
        raise ValueError(
            f"route='keys' is for causal, window and full self-attention, got {queries}; "
            "take route 'queries'"
        )
