"""Bytes of the tensors that are alive, counted as ops return them and as they die."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages made inside the scope, in this thread; scratch inside an op is not seen.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in given or key in self._alive:
            return

        def forget(_: weakref.ref) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
