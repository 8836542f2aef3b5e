"""The base class of what a feature does in the steps of engine torch (core/feature.py)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from samecurve.torch_engine.step.setup import EngineSetup, State
from samecurve.torch_engine.step.training_step import TrainingStep


class TorchHooks:
    """A feature in one process of a run. Each method does nothing where it is not overridden.

    value: what the plan has of the feature
    changes_products: whether the products of layers are others than their weights' formats say
    """

    changes_products: ClassVar[bool] = False

    def __init__(self, setup: EngineSetup, value: Any) -> None:
        self.setup, self.value = setup, value

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Change the layers of a model of this process."""

    def wrap_blocks(self, model: nn.Module) -> None:
        """Replace forward() of a model's blocks, once its layers are prepared."""

    def begin(self, state: State) -> None:
        """Add to a state that has been made, and whose arrays may have no values yet."""

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        """Add hooks to the lists of the training step; to those of each update, if a step has
        several.
        """
