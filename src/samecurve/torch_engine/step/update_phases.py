"""Several updates in turn within a step (a GAN's critic and generator): each phase has a loss, an
optimizer and parameters of its own.

Each has its own forward and backward passes, reduction, clipping and update, over all microbatches
of the step, one phase after the other. What a phase's loss does to the parameters of others is
computed and let go of.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from samecurve.core.planning.update_phases import Patterns, names_by_phase
from samecurve.core.protocols import MicroBatch, StepMetrics, StoredArrays
from samecurve.torch_engine.optimizers.built_in import make_built_in
from samecurve.torch_engine.optimizers.optimizer import OptimizerUpdate
from samecurve.torch_engine.optimizers.optimizer_params import OptimizerParam
from samecurve.torch_engine.optimizers.user_optimizer import UserOptimizer
from samecurve.torch_engine.randomness.microbatch_context import StagedKeys
from samecurve.torch_engine.step.named_means import NamedMeans
from samecurve.torch_engine.step.setup import EngineSetup
from samecurve.torch_engine.step.step_metrics import QueuedMetrics
from samecurve.torch_engine.step.unused_params import UsageCheck


@dataclass(frozen=True)
class Phase:
    name: str  # '': the task has none, and the step is one
    number: int
    trained: list[OptimizerParam]
    optimizer: OptimizerUpdate
    usage: UsageCheck
    named_means: NamedMeans = field(default_factory=NamedMeans)

    def keys_of(self, microbatch: MicroBatch) -> StagedKeys | None:
        """Each phase draws numbers of its own."""
        keys: StagedKeys | None = microbatch.keys
        if keys is None or not self.number:
            return keys
        return StagedKeys(keys.rows.of_phase(self.number))


def make_phases(
    setup: EngineSetup, trained: list[OptimizerParam], hidden: Collection[str]
) -> list[Phase]:
    """In the task's order. UserError: a parameter belongs to none, or to two.

    hidden: names of the matrices of hidden layers
    """
    patterns: Patterns = getattr(setup.task, "phases", {})
    make: Callable[..., torch.optim.Optimizer] | None = getattr(setup.task, "optimizer", None)
    by_phase = {"": {param.name for param in trained}}
    if patterns:
        by_phase = names_by_phase([param.name for param in trained], patterns)
    phases = []
    for number, (name, names) in enumerate(by_phase.items()):
        params = [param for param in trained if param.name in names]
        update: OptimizerUpdate
        if make:
            update = UserOptimizer(partial(make, phase=name), setup.optimizer, params)
        else:
            update = make_built_in(setup, params, hidden, phase=name)
        usage = UsageCheck(setup.plan, setup.comm, setup.device)
        phases.append(Phase(name, number, params, update, usage))
    return phases


class PhasedOptimizer:
    """The optimizers of all phases, as a checkpoint sees them."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases
        self._by_name = {param.name: phase.optimizer for phase in phases for param in phase.trained}

    def step(self, lr: float, *, finite: torch.Tensor | bool) -> None:
        for phase in self._phases:
            phase.optimizer.step(lr, finite=finite)

    def state_of(self, param: OptimizerParam) -> Mapping[str, torch.Tensor]:
        return self._by_name[param.name].state_of(param)

    def whole_states(self, param: OptimizerParam) -> Collection[str]:
        return self._by_name[param.name].whole_states(param)

    def shared_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for phase in self._phases:
            yield from phase.optimizer.shared_state()

    def create_state(self) -> None:
        for phase in self._phases:
            phase.optimizer.create_state()

    def after_restore(self, saved: StoredArrays, filled: Mapping[str, torch.Tensor]) -> None:
        for phase in self._phases:
            phase.optimizer.after_restore(saved, filled)


def optimizer_of(phases: Sequence[Phase]) -> OptimizerUpdate:
    return phases[0].optimizer if len(phases) == 1 else PhasedOptimizer(phases)


@dataclass(frozen=True)
class PhasedMetrics:
    """A step's: the loss of its first phase, those of the others by their names, and what each
    gives beside its own.
    """

    queued: Mapping[str, QueuedMetrics]  # by phase, in their order

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
