"""The base class of what a feature does in the steps of engine torch (core/feature.py)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from samecurve.core.evaluation import SumSpecs
from samecurve.core.protocols import Arrays, MicroBatch, Progress, TrialRows
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.step import EngineSetup, MakeOptimizer, State, Update
from samecurve.torch_engine.step.training_step import Step, TrainingStep
from samecurve.torch_engine.strategies import Materialize

if TYPE_CHECKING:
    from samecurve.torch_engine.model.model_builder import FirstMemory


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a training, before its first step.

    state: as the first step finds it
    rows: samples of the first step, in host memory
    stage: host rows -> tensors, as for a step
    is_split: whether a step has several microbatches
    kept: what kept() of all features has given to the checkpoint that the training goes on from
    first_memory: of the weights, as model() made them
    """

    state: State
    rows: TrialRows
    stage: Callable[[MicroBatch], MicroBatch]
    is_split: bool
    kept: Mapping[str, Any]
    first_memory: Sequence["FirstMemory"]


class TorchHooks:
    """A feature in one process of a run. Each method does nothing where it is not overridden.

    value: what the plan has of the feature
    changes_products: whether the products of layers are others than their weights' formats say
    moves_weights: whether weights lie on their device only for a while
    calls: the task's method that is called after an update; '': none
    moved_buffers: names of buffers that each rank moves by itself in a step
    names_on_host: parameters whose values lie in host memory, once models are prepared
    step_class: the class of a step, in the place of TrainingStep; of one feature in a run
    measures: whether evaluations call measure() and add_measured()
    """

    changes_products: ClassVar[bool] = False
    moves_weights: ClassVar[bool] = False
    step_class: ClassVar[type[TrainingStep] | None] = None
    measures: ClassVar[bool] = False

    calls: ClassVar[str] = ""
    moved_buffers: Collection[str] = ()
    names_on_host: Collection[str] = ()

    def __init__(self, setup: EngineSetup, value: Any) -> None:
        self.setup, self.value = setup, value

    def prepare(self, model: nn.Module, device_index: int) -> None:
        """Change the layers of the model of one of this process's devices."""

    def wrap_blocks(self, model: nn.Module) -> None:
        """Replace forward() of a model's blocks, once its layers are prepared."""

    def before_layout(self, materialize: Materialize) -> Materialize:
        """Before the strategy lays the models out. Returns what makes a part's parameters real."""
        return materialize

    def after_layout(self) -> None:
        """Once the strategy has laid the models out."""

    def updates(
        self, trained: Sequence[OptimizerParam], make_optimizer: MakeOptimizer
    ) -> list[Update]:
        """The updates of a step, in turn. Empty: there is one of all trained parameters."""
        del trained, make_optimizer
        return []

    def begin(self, state: State) -> None:
        """Add to a state that has been made, and whose arrays may have no values yet."""

    def begin_training(self, start: Start) -> Mapping[str, Any]:
        """Before the first step; all ranks call it together. Returns the features that the run
        needs for what was found, with what their hooks take, by name.

        UserError: the run must not be trained.
        """
        del start
        return {}

    def kept(self) -> Mapping[str, Any]:
        """What a checkpoint keeps as JSON, by name. All ranks call it together.

        UserError: it can't be kept, and the training depends on it.
        """
        return {}

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        """Add hooks to the lists of the training step; to those of each update, if a step has
        several.
        """

    def joined(self, steps: Sequence[TrainingStep]) -> Step | None:
        """The one step that the steps of several updates make. None: another feature's."""
        del steps
        return None

    def measure(self, model: Any, arrays: Arrays, progress: Progress) -> Any:
        """What is measured of a held-out microbatch beside the task's sums, on its device."""

    def add_measured(
        self,
        measured: Sequence[tuple[int, Any]],
        specs: SumSpecs,
        floats: torch.Tensor,
        *,
        progress: Progress,
        samples: int,
    ) -> None:
        """Add to the sums of an evaluation; all ranks call it together.

        measured: of this process's microbatches, the number and what measure() has given
        floats: [rows, sums], float64: a row for each microbatch, or one row
        samples: of the evaluation, over all ranks
        """
