"""A class's own schedule of the learning rate, in place of the config's."""

import inspect
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

from samecurve.errors import UserError
from samecurve.tasks.adapter.opened_class import OpenedClass
from samecurve.tasks.protocol import MEMBERS

Factors = Callable[[int], float]
FactorsOf = Callable[[Callable[..., Any]], Factors]


class OwnSchedule:
    """The factor of optimizer.lr at a step, by the class's schedule(), which it must have."""

    def __init__(self, opened: OpenedClass, with_optimizer: FactorsOf) -> None:
        """with_optimizer: the factors of a schedule(optimizer), which makes a scheduler of torch"""
        self._opened, self._with_optimizer = opened, with_optimizer

    def __call__(self, step: int) -> float:
        """UserError: the class's factor is no number of at least 0."""
        with self._opened.calling("schedule"):
            factor = self._factor(step)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            remedy = "a number of at least 0, by which optimizer.lr is multiplied"
            raise self._opened.wrong("schedule", f"gives {factor!r} at step {step}", remedy)
        return float(factor)

    @cached_property
    def _factor(self) -> Callable[[int], Any]:
        """The class's schedule of steps. UserError: it asks for something else than step."""
        schedule: Callable[..., Any] = self._opened.methods.schedule
        names = list(inspect.signature(schedule).parameters)
        if names == ["optimizer"]:
            return self._with_optimizer(schedule)
        if names != ["step"]:
            cause = f"asks for {', '.join(names) or 'nothing'}"
            raise self._opened.wrong("schedule", cause, MEMBERS["schedule"])
        return schedule

    def in_words(self) -> str:
        """The factors at some steps, as far as the schedule goes."""
        factors = [f"{self(0):.4g} at step 0"]
        for step in (10, 100, 1000):
            try:
                factors.append(f"{self(step):.4g} at {step}")
            except UserError:  # a run tries its own last step before the first
                break
        return f"{self._opened.name}.schedule(): {', '.join(factors)}"
