"""Watches of the first steps of a run, for parameters that the loss does not use yet (UsageWatch),
and tensors that the loss depends on and that nobody trains (HeldByTask).

A parameter that the loss has not used yet stays as it is. Once the loss has used a parameter, a
step that does not use it gives it a zero gradient, under every strategy, as in a loop that zeroes
gradients and does not drop them: momentum and weight decay go on moving it.

A tensor that a user's task keeps beside its model is trained by no optimizer and saved in no
checkpoint. A tensor that the loss depends on must be in the model.
"""

from collections.abc import Iterator

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.step.setup import EngineSetup, State, Update

_MOST_STEPS = 100  # after which the parameters are named that the loss has not used
_DEPTH = 3  # objects, lists and dicts within each other
_READERS = ("loss", "features", "batch_loss")
_MOST_COMPARED = 4096  # numbers of a tensor
# by path: the tensor, and a copy of some of its numbers
Contents = dict[str, tuple[torch.Tensor, torch.Tensor]]


class UsageWatch:
    """Watches which parameters of an update the loss has used, until it has used all of them.

    A parameter is trained from the first step in which any sample of the global batch gives it a
    gradient, as in a plain loop on one device. Until then it stays as it is. From then on a step
    that does not use the parameter gives it a zero gradient.

    All ranks must know of the first use before the update, so each watched step ends with one small
    all-reduce, for which the host waits. It names only the parameters that are still unused.
    """

    def __init__(self, setup: EngineSetup, state: State, update: Update) -> None:
        self._setup, self._state, self._update = setup, state, update
        plan = setup.plan
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._step = state.step
        self._unused = [
            param for param in update.trained if not self._step or state.late.get(param.name) == 0
        ]

    def end_step(self) -> bool:
        """Note what a step used. Returns whether something is left to watch. All ranks call it,
        between the reduction and the update.
        """
        is_first = not self._step
        self._step += 1
        used = self._used()
        unused = [param for param in self._unused if param.name not in used]
        if unused if is_first else used:
            from samecurve.torch_engine.optimizers.late_params import note_first_use

            names = [param.name for param in unused]
            note_first_use(self._state, self._update, used, names, is_first_step=is_first)
        self._unused = unused
        if unused and self._step == self._last_step:
            from samecurve.core.unused_params import unused_line

            self._setup.notes.append(unused_line([param.name for param in unused]))
        return bool(unused)

    def _used(self) -> set[str]:
        """The watched parameters that this step's loss used, on any rank."""
        has_gradient = self._setup.strategy.has_gradient
        counts = [float(has_gradient(param.parameter)) for param in self._unused]
        if self._setup.comm.group is not None and counts:
            sent = torch.tensor(counts, dtype=torch.float64, device=self._setup.device)
            counts = self._setup.comm.all_reduce(sent)().tolist()
        return {param.name for param, count in zip(self._unused, counts, strict=True) if count}


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

    def paths_of(self, dtype: torch.dtype) -> list[str]:
        """The tensors of a number format, by path."""
        return [path for path, tensor in self._tensors() if tensor.dtype == dtype]

    def refuse_changed(self, before: Contents, method: str) -> None:
        """Call it after a method of the task, with the contents from before.

        UserError: the method has changed a tensor of the task that the loss reads.
        """
        from samecurve.torch_engine.split_check.side_effects import equal
        from samecurve.torch_engine.split_check.user_code import names_read, place_of_method

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
