"""Tensors that a user's task keeps beside its model, which no optimizer trains and no checkpoint
saves: one that the loss depends on must be in the model.
"""

from collections.abc import Iterator

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.users_code import names_read, place_of_method
from samecurve.torch_engine.users_code.side_effects import equal

_DEPTH = 3  # objects, lists and dicts within each other
_READERS = ("loss", "features", "batch_loss")
_MOST_COMPARED = 4096  # numbers of a tensor
# by path: the tensor, and a copy of some of its numbers
Contents = dict[str, tuple[torch.Tensor, torch.Tensor]]


class HeldByTask:
    """The tensors in a task's attributes that are not the model's.

    model: the model that the task made
    """

    def __init__(self, task: object, model: nn.Module) -> None:
        self._task = getattr(task, "task", task)
        self._of_model = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def refuse_learned(self) -> None:
        """Call it after a backward pass.

        UserError: a tensor of the task has a gradient, and nobody would train it.
        """
        for path, tensor in self._tensors():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                raise UserError(
                    f"self.{path} is no part of what model() returns, so nobody trains it, and the"
                    " loss has a gradient for it",
                    "make it a submodule of the model (loss may call parts of it: model.head(x));"
                    " requires_grad_(False), where it is to stay as it is",
                    place_of_method(self._task, "loss"),
                )

    def contents(self) -> Contents:
        return {path: (tensor, _some_numbers(tensor)) for path, tensor in self._tensors()}

    def paths_of(self, dtype: torch.dtype) -> list[str]:
        """The tensors of a number format, by path."""
        return [path for path, tensor in self._tensors() if tensor.dtype == dtype]

    def refuse_changed(self, before: Contents, method: str) -> None:
        """Call it after a method of the task, with the contents from before.

        UserError: the method has changed a tensor of the task that the loss reads.
        """
        read = {name for reader in _READERS for name in names_read(self._task, reader)}
        for path, (tensor, numbers) in self.contents().items():
            if path.partition(".")[0] not in read:
                continue
            old, old_numbers = before.get(path, (None, None))
            if tensor is not old or not equal(numbers, old_numbers):
                raise UserError(
                    f"{method}() changes self.{path}, which the loss reads: what a task keeps is"
                    " in no checkpoint, so a resumed run would give another curve",
                    "keep it in the model: a submodule with requires_grad_(False), or"
                    " register_buffer(), in what model() returns",
                    place_of_method(self._task, method),
                )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by path, without those of the model."""
        for path, tensor in _within("", getattr(self._task, "__dict__", {}), _DEPTH):
            if id(tensor) not in self._of_model:
                yield path, tensor


def _some_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of up to 4096 numbers, spread over the tensor: a change that is written through
    `.data` is seen by its values only, and a copy of a whole teacher may have no room.
    """
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.flatten()
    return flat[:: -(-len(flat) // _MOST_COMPARED) or 1].clone()


def _within(path: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{path}.{name}", tensor
    elif depth and isinstance(value, dict | list | tuple):
        named = value if isinstance(value, dict) else dict(enumerate(value))
        for key, inner in named.items():
            yield from _within(f"{path}.{key}".lstrip("."), inner, depth - 1)
