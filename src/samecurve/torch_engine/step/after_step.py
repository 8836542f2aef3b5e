"""What a task does with its model after each update: a momentum teacher follows its student. The
first time it is looked at what the task keeps beside its model.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from samecurve.core.protocols import Task
from samecurve.errors import UserError
from samecurve.torch_engine.randomness.generators import GeneratorWatch
from samecurve.torch_engine.split_check.task_tensors import HeldByTask
from samecurve.torch_engine.strategies.protocol import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable


class AfterStep:
    """Does nothing for a task without after_step(), but once."""

    def __init__(self, task: Task, strategy: Strategy, device: torch.device) -> None:
        self._function: Callable[[nn.Module, int], None] | None = getattr(task, "after_step", None)
        self._strategy, self._device, self._checked = strategy, device, False
        self._task = task

    @torch.no_grad()
    def __call__(self, step: int, *, finite: torch.Tensor | bool) -> None:
        """After step `step`, counted from 0; not after an update that was left out.

        UserError: it draws random numbers, which each rank would draw for itself; or what the task
        keeps beside its model is learnt, or changed.
        """
        function, held = self._function, None
        if not self._checked:
            held = HeldByTask(self._task, self._strategy.models[0])
            held.refuse_learned()
        # bool waits for the device: what the task does can't be left out there
        if function is None or not bool(finite):
            self._checked = self._checked or function is None
            return
        if held is None:
            self._strategy.change(function, step)
            return
        watch, versions = GeneratorWatch(self._device), held.versions()
        self._strategy.change(function, step)
        held.refuse_changed(versions)
        if watch.moved():
            raise UserError(
                "after_step() of the task draws random numbers, which each rank would draw for"
                " itself",
                "what follows from the weights and the step alone; or numbers of a"
                " torch.Generator() seeded by the step",
                "task",
            )
        self._checked = True
