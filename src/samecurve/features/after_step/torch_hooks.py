"""The call of a task's after_step(), after the last update of a step."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.split_check.side_effects import GeneratorStates
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.first_steps import HeldByTask
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.step.training_step import TrainingStep


class Hooks(TorchHooks):
    """Adds the call to the last update of a step."""

    value: Callable[[nn.Module, int], None]  # the task's method
    calls = "after_step"

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        steps[-1].after_update.append(AfterStep(self.value, self.setup))


class AfterStep:
    """Calls the task's after_step(); looks, the first time, at what it does beside its model."""

    def __init__(self, function: Callable[[nn.Module, int], None], setup: EngineSetup) -> None:
        self._function, self._setup, self._checked = function, setup, False

    @torch.no_grad()
    def __call__(self, step: int, finite: torch.Tensor | bool) -> None:  # noqa: FBT001 - a hook
        """After step `step`, counted from 0; not after an update that was left out.

        UserError: after_step() draws random numbers, which each rank would draw for itself; or it
        changes what the task keeps beside its model.
        """
        # bool() waits for the device: what the task does can't be left out there
        if not bool(finite):
            return
        strategy = self._setup.strategy
        if self._checked:
            strategy.change(self._function, step)
            return
        held = HeldByTask(self._setup.task, strategy.models[0])
        generators, contents = GeneratorStates(self._setup.device), held.contents()
        strategy.change(self._function, step)
        held.refuse_changed(contents, Hooks.calls)
        if generators.moved():
            raise UserError(
                "after_step() of the task draws random numbers, which each rank would draw for"
                " itself",
                "what follows from the weights and the step alone; or numbers of a"
                " torch.Generator() seeded by the step",
                "task",
            )
        self._checked = True
