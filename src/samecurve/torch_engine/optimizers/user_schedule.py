"""A task's own torch scheduler as a pure function of the step, so that no state of it needs saving.

It drives an optimizer of one parameter that trains nothing, from the first step on: what it makes
of the learning rate at each step is kept. A resume begins there too.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.errors import UserError


class SchedulerFactors:
    """Factors of the config's learning rate.

    make: the optimizer -> its scheduler
    what: the method, for errors

    UserError: it is none that follows from the step alone.
    """

    def __init__(
        self, make: Callable[[torch.optim.Optimizer], object], fields: Optimizer, what: str
    ) -> None:
        self._what, self._lr = what, fields.lr
        self._optimizer = _optimizer_like(fields)
        before = self._settings()
        scheduler: Any = make(self._optimizer)
        schedulers = torch.optim.lr_scheduler
        self.name = type(scheduler).__name__
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            raise self._refused(
                "follows what is measured, and not the step",
                "a schedule of the step alone: CosineAnnealingLR, or schedule(self, step)",
            )
        if not isinstance(scheduler, schedulers.LRScheduler):
            raise UserError(
                f"{what} returns {self.name}, not a torch scheduler",
                "return LambdaLR(optimizer, ...), or def schedule(self, step) -> factor",
                "task",
            )
        self._scheduler, self._before = scheduler, before
        self._factors = [self._factor()]
        self._ended: Exception | None = None
        self._optimizer.step()  # a scheduler wants to come after it

    def __call__(self, step: int) -> float:
        while len(self._factors) <= step:
            if self._ended:  # nobody knows what became of the scheduler
                raise self._ended
            self._advance()
        return self._factors[step]

    def _advance(self) -> None:
        try:
            with warnings.catch_warnings():
                # SequentialLR and others call each other in ways that torch warns of
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step()
        except Exception as error:  # OneCycleLR beyond its last step
            self._ended = error
            raise
        self._factors.append(self._factor())

    def _factor(self) -> float:
        changed = [key for key, value in self._settings().items() if self._before[key] != value]
        if changed:
            raise self._refused(
                f"also changes {', '.join(changed)} of the optimizer, which a step does not follow",
                "cycle_momentum=False, where it has that",
            )
        return float(self._optimizer.param_groups[0]["lr"]) / self._lr

    def _settings(self) -> Mapping[str, str]:
        """The settings of the optimizer beside the learning rate."""
        (group,) = self._optimizer.param_groups
        return {key: repr(group[key]) for key in self._optimizer.defaults if key != "lr"}

    def _refused(self, cause: str, remedy: str) -> UserError:
        return UserError(f"{self._what}: {self.name} {cause}", remedy, "task")


def _optimizer_like(fields: Optimizer) -> torch.optim.Optimizer:
    params = [torch.zeros((), requires_grad=True)]
    if fields.name == "adamw":
        return torch.optim.AdamW(params, lr=fields.lr, betas=fields.betas)
    return torch.optim.SGD(params, lr=fields.lr, momentum=fields.momentum)
