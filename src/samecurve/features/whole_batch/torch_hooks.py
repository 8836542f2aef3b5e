"""A loss over the whole batch in engine torch: its step and its evaluation."""

from collections.abc import Sequence
from typing import Any

import torch

from samecurve.core.evaluation import SumSpecs
from samecurve.core.protocols import Arrays, Progress
from samecurve.features.whole_batch.batch_loss_step import BatchLossStep
from samecurve.torch_engine.step.feature_hooks import TorchHooks


class Hooks(TorchHooks):
    """Takes the loss of the features of all samples."""

    step_class = BatchLossStep
    measures = True

    def measure(self, model: Any, arrays: Arrays, progress: Progress) -> Arrays:
        """The features of held-out samples, on the host."""
        features = self.setup.task.features(model, arrays, progress)
        return {name: feature.cpu() for name, feature in features.items()}

    def add_measured(
        self,
        measured: Sequence[tuple[int, Arrays]],
        specs: SumSpecs,
        floats: torch.Tensor,
        *,
        progress: Progress,
        samples: int,
    ) -> None:
        from samecurve.features.whole_batch.batch_evaluation import add_batch_losses

        add_batch_losses(self.setup, measured, specs, floats, progress=progress, samples=samples)
