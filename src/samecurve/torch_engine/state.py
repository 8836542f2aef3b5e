"""A training state: the model, the updates that move it, and what belongs to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samecurve.torch_engine.model.weight_average import WeightAverage
from samecurve.torch_engine.optimizers.optimizer import OptimizerUpdate
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam
from samecurve.torch_engine.step.precision import LossScale


@dataclass(frozen=True)
class Update:
    """The parameters that one update moves, and their optimizer. A step has one update, or one for
    each phase of a GAN.
    """

    trained: Sequence[OptimizerParam]
    optimizer: OptimizerUpdate
    phase: str = ""  # its name; '': the step has no phases
    number: int = 0  # of the phase


@dataclass
class State:
    model: nn.Module  # bare, with weights and gradients of this process's first device
    trained: list[OptimizerParam]
    optimizer: OptimizerUpdate  # of all updates
    scale: LossScale | None = None  # of the loss, in f16
    unbounded: frozenset[str] = frozenset()  # buffers with infinities from the start (a mask)
    updates: Sequence[Update] = ()  # of a step, one after the other
    # of what is frozen, where checkpoints leave it out (frozen_base.py); [32] uint8
    base_digest: torch.Tensor | None = None
    average: WeightAverage | None = None

    def __post_init__(self) -> None:
        self.parameters = [param.parameter for param in self.trained]
