"""Several updates in turn within a step (a GAN's critic and generator): each phase has a loss, an
optimizer and parameters of its own.

Each phase has its own forward and backward passes, reduction, clipping and update, over all
microbatches of the step, one phase after the other. What the loss of a phase does to the parameters
of other phases is computed and dropped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samecurve.core.config.param_groups import Patterns, names_by_phase
from samecurve.core.protocols import Batch, PendingMetrics, Round, StepMetrics
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.step import MakeOptimizer, State, Update
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import Step, TrainingStep


class Hooks(TorchHooks):
    """Makes an update of each phase, in the task's order, and one step of them."""

    value: Patterns  # of parameters' names, by phase

    def updates(
        self, trained: Sequence[OptimizerParam], make_optimizer: MakeOptimizer
    ) -> list[Update]:
        """UserError: a parameter belongs to no phase, or to two."""
        by_phase = names_by_phase([param.name for param in trained], self.value)
        updates = []
        for number, (phase, names) in enumerate(by_phase.items()):
            params = [param for param in trained if param.name in names]
            optimizer = make_optimizer(params, phase)
            updates.append(Update(params, optimizer, make_optimizer, phase, number))
        return updates

    def joined(self, steps: Sequence[TrainingStep]) -> Step:
        return StepsInTurn(steps).run


class StepsInTurn:
    """The training step of a task with phases: that of each phase, one after the other."""

    def __init__(self, steps: Sequence[TrainingStep]) -> None:
        self._steps = steps

    def run(
        self, state: State, batch: Batch[list[Round]], lr: float, requests: Sequence[int]
    ) -> tuple[State, PendingMetrics]:
        queued = {}
        for step in self._steps:
            state, queued[step.update.phase] = step.run(state, batch, lr, requests)
        return state, PhasedMetrics(queued)


@dataclass(frozen=True)
class PhasedMetrics:
    """The metrics of a step with phases: the loss of the first phase, the losses of the others by
    their names, and what each phase gives beside its loss.
    """

    queued: Mapping[str, PendingMetrics]  # by phase, in their order

    @property
    def on_host(self) -> bool:
        return all(queued.on_host for queued in self.queued.values())

    def read(self) -> StepMetrics:
        by_phase = {phase: queued.read() for phase, queued in self.queued.items()}
        first, *others = by_phase
        means = {phase: by_phase[phase].loss for phase in others}
        for phase, metrics in by_phase.items():
            means |= {f"{phase}.{name}": mean for name, mean in metrics.means.items()}
        every = by_phase.values()
        return replace(
            by_phase[first],
            means=means,
            grad_norm=math.hypot(*(metrics.grad_norm for metrics in every)),
            finite=all(metrics.finite for metrics in every),
            done_at=max(metrics.done_at for metrics in every),
        )
