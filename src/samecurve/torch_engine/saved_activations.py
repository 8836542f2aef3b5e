"""What a model keeps for its backward pass: counted by running it on tensors without values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from samecurve.torch_engine.model import KEPT_OPERATIONS


@dataclass
class SavedActivations:
    """In 4-byte numbers."""

    outside: int = 0  # of the blocks
    blocks: list[int] = field(default_factory=list)  # of each block
    inputs: list[int] = field(default_factory=list)  # of each block's first argument
    products: list[int] = field(default_factory=list)  # that recompute "selective" keeps of each

    @property
    def total(self) -> int:
        return self.outside + sum(self.blocks)

    def recomputed(self, how: str) -> int:
        """Where blocks run again in backward, one after the other. how: block, selective"""
        kept = sum(self.inputs) + (sum(self.products) if how == "selective" else 0)
        return self.outside + kept + max(self.blocks, default=0)


def count_saved(
    model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], object]
) -> SavedActivations:
    """run: a forward pass of the model, whose tensors and the model's have no values (FakeTensor).

    Weights are not counted, and what several operations keep is counted once.
    """
    saved = SavedActivations()
    counter = _Counter(model, saved)
    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(counter.enter))
        handles.append(block.register_forward_hook(counter.leave))
    try:
        with saved_tensors_hooks(counter.save, _as_it_is), _Products(counter):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return saved


class _Counter:
    def __init__(self, model: nn.Module, saved: SavedActivations) -> None:
        self._saved = saved
        # held, so that no other storage takes their place meanwhile
        self._seen: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._is_new(tensor)
        self.in_block = False

    def enter(self, _block: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        self._saved.blocks.append(0)
        self._saved.products.append(0)
        self._saved.inputs.append(_numbers(first) if isinstance(first, torch.Tensor) else 0)
        self.in_block = True

    def leave(self, _block: nn.Module, _arguments: object, _output: object) -> None:
        self.in_block = False

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_new(tensor):
            if self.in_block:
                self._saved.blocks[-1] += _numbers(tensor)
            else:
                self._saved.outside += _numbers(tensor)
        return tensor

    def product(self, tensor: torch.Tensor) -> None:
        if self.in_block:
            self._saved.products[-1] += _numbers(tensor)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - its identity; public nowhere
        if key in self._seen:
            return False
        self._seen[key] = storage
        return True


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what recompute "selective" keeps."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func in KEPT_OPERATIONS:
            first = result[0] if isinstance(result, tuple) else result
            self._counter.product(first)
        return result


def _numbers(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // 4


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
