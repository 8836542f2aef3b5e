"""Checks in the first steps of a run: for parameters that the loss never uses (UsageCheck), and for
tensors that the loss depends on and that nobody trains (HeldByTask).

A parameter that the loss of one step does not use has a zero gradient in that step, under every
strategy, as in a loop that zeroes gradients and does not drop them. Momentum and weight decay go on
moving it. A parameter that is never used is named, since weight decay alone would move it.

A tensor that a user's task keeps beside its model is trained by no optimizer and saved in no
checkpoint. A tensor that the loss depends on must be in the model.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.units import counted

_MOST_STEPS = 100  # in which every parameter is to be used once
_DEPTH = 3  # objects, lists and dicts within each other
_READERS = ("loss", "features", "batch_loss")
_MOST_COMPARED = 4096  # numbers of a tensor
# by path: the tensor, and a copy of some of its numbers
Contents = dict[str, tuple[torch.Tensor, torch.Tensor]]


class UsageCheck:
    """Watches a run's first epoch, or 100 steps, or all there are, until some rank has used every
    parameter.

    names: of the parameters that are trained.
    """

    def __init__(self, plan: Plan, comm: Comm, device: torch.device, names: Sequence[str]) -> None:
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._comm, self._device = comm, device
        self._names, self._used = names, set[str]()
        self._step = 0

    def add(self, with_grad: AbstractSet[str]) -> bool:
        """Note what a step used. Returns whether nothing is left to watch. All ranks call it.

        with_grad: parameters to which this rank's loss gave a gradient.

        UserError, on every rank: the last step that is watched, and some were never used.
        """
        self._used |= with_grad
        self._step += 1
        is_last = self._step >= self._last_step
        is_power_of_two = not self._step & (self._step - 1)
        if not is_last and not is_power_of_two:
            return False
        flags = [float(name in self._used) for name in self._names]
        used_by = torch.tensor(flags, dtype=torch.float64, device=self._device)
        counts: list[float] = self._comm.all_reduce(used_by)().tolist()
        unused = [name for name, count in zip(self._names, counts, strict=True) if not count]
        if is_last and unused:
            raise _never_used(unused, self._step)
        return is_last or not unused


def _never_used(names: Sequence[str], steps: int) -> UserError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return UserError(
        f"the loss does not use {', '.join(names[:4])}{more}: no gradient came in"
        f" {counted(steps, 'step')}",
        "take them out of the model, or freeze them: parameter.requires_grad_(False) there, or"
        " optimizer.groups in the config",
        "model",
    )


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

    def contents(self) -> Contents:
        return {path: (tensor, _some_numbers(tensor)) for path, tensor in self._tensors()}

    def refuse_changed(self, before: Contents) -> None:
        """Call it after the task's after_step(), with the contents from before.

        UserError: after_step() has changed a tensor of the task that the loss reads.
        """
        from samecurve.torch_engine.split_check.side_effects import equal
        from samecurve.torch_engine.split_check.user_code import names_read, place_of_method

        read = {name for method in _READERS for name in names_read(self._task, method)}
        for path, (tensor, numbers) in self.contents().items():
            if path.partition(".")[0] not in read:
                continue
            old, old_numbers = before.get(path, (None, None))
            if tensor is not old or not equal(numbers, old_numbers):
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
