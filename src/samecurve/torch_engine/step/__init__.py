"""The objects that the training of one process consists of, shared by the parts of the engine: what
stays as it is (EngineSetup), and what each step moves (State).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from samecurve.core.config.sections import Optimizer
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Task
from samecurve.torch_engine.optimizers import OptimizerParam, OptimizerUpdate
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.torch_engine.strategies import Strategy

if TYPE_CHECKING:
    from samecurve.torch_engine.model.same_programs import SamePrograms


class Average(Protocol):
    """Numbers that evaluations and samples take in the place of the trained parameters.

    values: this process's parts, one for each trained parameter
    begin: begin with the weights as they are
    in_use: put them in the place of the weights, on every replica, while the block runs
    """

    values: list[torch.Tensor]

    def begin(self) -> None: ...
    def in_use(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    task: Task
    plan: Plan
    optimizer: Optimizer  # the config's section
    comm: Comm
    devices: Sequence[torch.device]  # of this process
    strategy: Strategy
    contexts: Sequence[MicroBatchContext]  # one for each of the devices
    draw_sites: DrawSites  # of all of them
    # for the user; the loop records and empties it
    notes: list[str | Event] = field(default_factory=list)
    # the hooks of the run's features, by name and in their order (feature_hooks.py)
    features: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def compiler(self) -> "str | SamePrograms":
        """The backend of torch.compile: torch's or, where kernels are to be deterministic, ours,
        which makes the same programs on all ranks.
        """
        compute = self.plan.compute
        if not compute.deterministic:
            return "inductor"
        from samecurve.torch_engine.model.same_programs import SamePrograms

        return SamePrograms(self.comm, compute.threads, self.device)

    @property
    def moved_buffers(self) -> set[str]:
        """Names of buffers that each rank moves by itself in a step."""
        return {name for hooks in self.features.values() for name in hooks.moved_buffers}

    @property
    def device(self) -> torch.device:
        """The first device, which holds the weights that are trained."""
        return self.devices[0]

    @property
    def has_several_devices(self) -> bool:
        """Whether this process has several devices of the plan."""
        return self.plan.layout.num_devices > self.plan.layout.world_size


MakeOptimizer = Callable[[Sequence[OptimizerParam], str], OptimizerUpdate]  # (trained, phase)


@dataclass
class Update:
    """The parameters that one update moves, and their optimizer. A step has one update, or one for
    each phase of a GAN.

    make: makes an optimizer for some of the parameters
    """

    trained: Sequence[OptimizerParam]
    optimizer: OptimizerUpdate
    make: MakeOptimizer
    phase: str = ""  # its name; '': the step has no phases
    number: int = 0  # of the phase


@dataclass
class State:
    model: nn.Module  # bare, with weights and gradients of this process's first device
    trained: list[OptimizerParam]
    optimizer: OptimizerUpdate  # of all updates
    unbounded: frozenset[str] = frozenset()  # buffers with infinities from the start (a mask)
    updates: Sequence[Update] = ()  # of a step, one after the other
    # of what is frozen, where checkpoints leave it out (frozen_base.py); [32] uint8
    base_digest: torch.Tensor | None = None
    average: Average | None = None
    # numbers that features keep, by a checkpoint's name, which begins with loop/
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0  # how many steps were done when this process began
    # by name, the parameters that the first step did not use (optimizers/late_params.py)
    late: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = [param.parameter for param in self.trained]
