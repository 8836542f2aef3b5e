"""The loss scale in engine torch. It follows only from numbers that every rank has alike, so it
stays the same on all.
"""

from collections.abc import Sequence
from functools import partial

import torch

from samecurve.core.determinism.step_arithmetic import next_loss_scale
from samecurve.core.protocols import Batch, Round
from samecurve.torch_engine.step import State
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import Finite, TrainingStep

_SCALE, _STREAK = "loop/scale", "loop/scale_streak"
_INITIAL_SCALE = 2.0**16


class Hooks(TorchHooks):
    """Sets the loss scale before each step, and adapts it after each update."""

    def begin(self, state: State) -> None:
        scale = torch.tensor(_INITIAL_SCALE, dtype=torch.float64, device=self.setup.device)
        state.numbers |= {_SCALE: scale, _STREAK: torch.zeros_like(scale)}

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        for step in steps:
            step.before_step.append(partial(_set_scale, step))
            step.after_update.append(partial(_adapt, step.state))


def _set_scale(step: TrainingStep, _batch: Batch[list[Round]]) -> None:
    step.set_loss_scale(step.state.numbers[_SCALE])


def _adapt(state: State, _step: int, finite: Finite) -> None:
    """New tensors take the place of the old ones, which metrics are read from one step late."""
    numbers, finite = state.numbers, torch.as_tensor(finite)
    numbers[_SCALE], numbers[_STREAK] = next_loss_scale(
        numbers[_SCALE], numbers[_STREAK], finite, torch.where
    )
