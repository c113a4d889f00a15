"""Whether the installed Megatron is one that the hooks fit, asked without changing anything."""

from megatron_splitkv.mcore import hooks, norm, upstream_fixes
from megatron_splitkv.mcore.hook_table import splitkv_replacements
from megatron_splitkv.mcore.launch import TESTED_MEGATRON
from megatron_splitkv.mcore.session import Session

__all__ = ["TESTED_MEGATRON", "hook_faults"]


def hook_faults() -> dict[str, str | None]:
    """For each name of Megatron that the launcher replaces, what is wrong with it, or None."""
    replacements = [
        *splitkv_replacements(Session()),
        *norm.norm_replacements(),
        *upstream_fixes.wheel_replacements(),
        *upstream_fixes.packed_replacements(),
        *upstream_fixes.gloo_replacements(),
    ]
    return {item.target: hooks.fault_of(item) for item in replacements}
