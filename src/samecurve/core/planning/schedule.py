"""The learning rate of a step: a pure function of the step, so that no state of it needs saving."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up to a peak, and what follows it."""

    peak: float  # learning rate after warm-up
    steps: int
    warmup: int = 0  # steps
    decay: Decay | Literal["task"] = "cosine"  # task: by the task's own schedule
    final: float = 0.1  # share of the peak left at the end
    cooldown: float = 0.2  # share of the steps in which wsd decays

    def at(self, step: int, task_factor: Callable[[int], float] | None = None) -> float:
        """The rate of a step, counted from 0.

        The first step of a warm-up of n takes peak/n, the n-th the peak.

        task_factor: of a step, by the task's own schedule
        """
        if self.decay == "task":
            assert task_factor, "the task has a schedule"
            # an experiment may take more steps than the run has, for which the task has no factor
            return self.peak * task_factor(min(step, self.steps - 1))
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        span = max(1, self.steps - 1 - self.warmup)
        done = min(1.0, (step - self.warmup) / span)
        return self.peak * self._share(done)

    def _share(self, done: float) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "linear":
            return 1.0 + (self.final - 1.0) * done
        if self.decay == "cosine":
            return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))
        if not self.cooldown:  # of wsd: warm-up, stable, decay
            return 1.0
        into = max(0.0, done - (1.0 - self.cooldown)) / self.cooldown
        return 1.0 + (self.final - 1.0) * into
