"""The guard in engine torch: what it tries before the first step, and what it watches later."""

from collections.abc import Mapping, Sequence
from typing import Any

from samecurve.features.guard import SentinelRule
from samecurve.features.guard.additivity import lines_or_refuse
from samecurve.features.guard.split_check import SplitCheck
from samecurve.features.guard.step_guard import StepGuard
from samecurve.torch_engine.step.feature_hooks import Start, TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code.holders import HeldByTask


class Hooks(TorchHooks):
    """Watches the training of one process."""

    value: SentinelRule | None
    _start: Start | None = None  # None: nothing is trained

    def begin_training(self, start: Start) -> Mapping[str, Any]:
        """UserError: the loss does not add up, does not repeat, or writes where it must not."""
        setup, self._start = self.setup, start
        verdict = SplitCheck(setup, start.rows, start.stage, is_split=start.is_split).run()
        lines = lines_or_refuse(
            verdict.error,
            repeats=verdict.repeats,
            is_split=start.is_split,
            allowed=setup.plan.compute.allow_coupled,
        )
        setup.notes.extend([*lines, *verdict.notes])
        return verdict.brings

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        if self._start is None:
            return
        for step in steps:
            StepGuard(step, self.value, phases=len(steps), is_split=self._start.is_split)
        steps[-1].after_reduction += [self._refuse_learned, self._refuse_stale_views]

    def _refuse_learned(self) -> None:
        """Once, after a backward pass. UserError: the loss trains a tensor outside of the model."""
        HeldByTask(self.setup.task, self.setup.strategy.models[0]).refuse_learned()

    def _refuse_stale_views(self) -> None:
        """Once, after forward passes. UserError: a view of a weight doesn't follow the weight."""
        from samecurve.features.guard.kept_views import refuse_stale_views

        assert self._start is not None
        refuse_stale_views(self._start.first_memory, self.setup)
