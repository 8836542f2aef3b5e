"""Tensors that a user's task keeps beside its model, which no optimizer trains and no checkpoint
saves. Tensors that the loss depends on must be in the model; the first step shows whether they are.
"""

from collections.abc import Iterator

import torch
from torch import nn

from samecurve.errors import UserError

_DEPTH = 3  # objects, lists and dicts within each other
_READERS = ("loss", "features", "batch_loss")
# by path: the tensor, and the version that counts its changes in place
Versions = dict[str, tuple[torch.Tensor, int]]


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
                from samecurve.torch_engine.split_check.user_code import place_of_method

                raise UserError(
                    f"self.{path} is no part of what model() returns, so nobody trains it, and the"
                    " loss has a gradient for it",
                    "make it a submodule of the model (loss may call parts of it: model.head(x));"
                    " requires_grad_(False), where it is to stay as it is",
                    place_of_method(self._task, "loss"),
                )

    def versions(self) -> Versions:
        return {path: (tensor, tensor._version) for path, tensor in self._tensors()}  # noqa: SLF001

    def refuse_changed(self, before: Versions) -> None:
        """Call it after the task's after_step(), with the versions from before.

        UserError: after_step() has changed a tensor of the task that the loss reads.
        """
        from samecurve.torch_engine.split_check.user_code import names_read, place_of_method

        read = {name for method in _READERS for name in names_read(self._task, method)}
        for path, (tensor, version) in self.versions().items():
            old, old_version = before.get(path, (None, 0))
            if path.partition(".")[0] in read and (tensor is not old or version != old_version):
                raise UserError(
                    f"after_step() changes self.{path}, which the loss reads: what a task keeps is"
                    " in no checkpoint, so a resumed run would give another curve",
                    "keep it in the model: a submodule with requires_grad_(False), or"
                    " register_buffer(), in what model() returns",
                    place_of_method(self._task, "after_step"),
                )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by path, without those of the model."""
        for path, tensor in _within("", getattr(self._task, "__dict__", {}), _DEPTH):
            if id(tensor) not in self._of_model:
                yield path, tensor


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
