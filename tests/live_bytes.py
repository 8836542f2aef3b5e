"""Bytes of the tensors that live at one time, at most: what a GPU's allocator would report, counted
on any device.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of those that come to be while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in before and _has_bytes(leaf):
                self._add(leaf.untyped_storage())
        if self.now > self.peak:  # fsdp empties storages that it keeps: their sizes are asked anew
            self.peak = max(self.peak, self.measured())
        return result

    def measured(self) -> int:
        """The bytes that live now. Unlike `now` it leaves out storages that were emptied."""
        return sum(self._bytes_now())

    def _bytes_now(self) -> Iterator[int]:
        for reference, _ in list(self._sizes.values()):
            storage = reference()
            yield storage.nbytes() if storage is not None else 0

    def _add(self, storage: Any) -> None:
        key = storage._cdata  # its identity; public nowhere
        if key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = (weakref.ref(storage, lambda _: self._drop(key)), size)
        self.now += size

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)[1]


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Tensors on meta have none, nor has a DTensor beside its local one."""
    return not (tensor.is_meta or is_traceable_wrapper_subclass(tensor))
