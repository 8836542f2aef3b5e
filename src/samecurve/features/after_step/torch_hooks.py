"""The call of a task's after_step(), after the last update of a step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from samecurve.core.determinism.sample_keys import step_key
from samecurve.errors import UserError
from samecurve.torch_engine.randomness import seed_host, seed_torch
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import equal
from samecurve.torch_engine.users_code.holders import Contents, HeldByTask
from samecurve.torch_engine.users_code.side_effects import Attributes, access_of

_AFTER_STEP = -2  # the epoch in the keys of what after_step() draws: no microbatch has these


class Hooks(TorchHooks):
    """Adds the call to the last update of a step."""

    value: Callable[[nn.Module, int], None]  # the task's method
    calls = "after_step"

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        steps[-1].after_update.append(AfterStep(self.value, self.setup))


class AfterStep:
    """Calls the task's after_step().

    Each process calls it by itself. So torch's, numpy's and Python's generators are seeded by the
    step before: all processes draw the same numbers, after a resume, too.
    """

    def __init__(self, function: Callable[[nn.Module, int], None], setup: EngineSetup) -> None:
        self._function, self._setup = function, setup
        self._own: dict[str, Any] | None = None  # the task's own generators, by name; None: unknown

    @torch.no_grad()
    def __call__(self, step: int, finite: torch.Tensor | bool) -> None:  # noqa: FBT001 - a hook
        """After step `step`, counted from 0; not after an update that was left out.

        UserError: after_step() draws from a generator that the task keeps; or it changes a tensor
        that the task keeps beside its model.
        """
        # bool() waits for the device: what the task does can't be left out there
        if not bool(finite):
            return
        setup = self._setup
        key = step_key(setup.plan.fixed.seed, _AFTER_STEP, step)
        seed_torch(key, setup.device)
        seed_host(key)
        contents = self._first_look() if self._own is None else None
        states = self._states()
        setup.strategy.change(self._function, step)
        if contents is not None:
            self._held().refuse_changed(contents, Hooks.calls)
        if not equal(states, self._states()):
            moved = [name for name, now in self._states().items() if not equal(states[name], now)]
            raise UserError(
                f"after_step() draws from {moved[0]}, which no checkpoint holds: a resumed run"
                " would draw other numbers",
                "torch's, numpy's or Python's own functions, which are seeded by the step there",
                "task",
            )

    def _first_look(self) -> Contents:
        """Find the task's own generators. Returns the tensors that it keeps beside its model."""
        setup = self._setup
        task = getattr(setup.task, "task", setup.task)
        self._own = Attributes(setup.strategy.models[0], task).generators()
        return self._held().contents()

    def _held(self) -> HeldByTask:
        return HeldByTask(self._setup.task, self._setup.strategy.models[0])

    def _states(self) -> dict[str, Any]:
        return {name: access_of(one)[0]() for name, one in (self._own or {}).items()}
