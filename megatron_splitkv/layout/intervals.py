"""The mask of a partial attention: one interval of keys for each query row."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megatron_splitkv.plan.plan import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyIntervals:
    """The mask of one partial attention: row i sees local KV rows `[begin[i], end[i])`.

    Attributes:
        begin, end: `[R]` int32; a row with `begin >= end` sees nothing.
        begin_on_host, end_on_host: the same on the CPU, where kernels plan their work.
    """

    begin: Tensor
    end: Tensor
    begin_on_host: Tensor
    end_on_host: Tensor

    @classmethod
    def on_host(cls, begin: Tensor, end: Tensor) -> Self:
        """Intervals whose tensors are all on the CPU."""
        return cls(begin=begin, end=end, begin_on_host=begin, end_on_host=end)

    @classmethod
    def among(cls, keys: Int64Array, seen: Int64Array) -> Self:
        """Intervals of sorted `keys` of the pack, for rows that see `seen` of it, `[R, 2]`."""
        bounds = np.searchsorted(keys, seen).astype(np.int32)
        begin, end = (torch.from_numpy(bounds[:, side].copy()) for side in (0, 1))
        return cls.on_host(begin, end)
