"""The strategies of this engine, and the base of all: how a model lies on devices, and how
gradients are summed over them.

The base class is the strategy of one device. Another strategy overrides the methods in which it
differs. It is one class, one row in core/strategies.py, one entry here, and a layout in
tests/test_promise.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TypeVar

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.optimizers import OptimizerParam
from samecurve.torch_engine.process_group import Comm, Peers

T = TypeVar("T")
Materialize = Callable[[nn.Module], None]  # makes the parameters of a part real


class GatherOrderError(UserError):
    """What a pass asks for does not come in the order that the first pass has found."""


class Strategy:
    """How a model lies on devices. A task's use of a model goes through train() or call().

    models: one for each device of this process, as the task made them. The first one holds the
        weights and, after reduce(), the gradients.
    """

    gathers_weights = False  # whether all ranks must compute a forward or backward pass together

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        self._plan, self._comm, self._devices = plan, comm, devices
        self.models: list[nn.Module] = []
        self.caches: list[Callable[[], None]] = []  # each forgets copies of weights (see reset())

    def peers(self) -> Sequence[Peers]:
        """For each device of this process, the peers that it adds up values with."""
        return [self._comm]

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        """Lay out the first of `models`, part by part; the others are for the other devices of this
        process.
        """
        materialize(models[0])
        self.models = [models[0].to(self._devices[0])]

    # A step calls these, in this order:

    def begin_step(self, parameters: Sequence[nn.Parameter], _num_microbatches: int) -> None:
        """Before a step: no gradient is left. num_microbatches: over all devices."""
        for parameter in parameters:
            parameter.grad = None

    def run_jobs(self, jobs: Sequence[Callable[..., T]], *arguments: object) -> list[T]:
        """Call job(*arguments) for each job, one for each device of this process; their results."""
        return [jobs[0](*arguments)]

    def begin_microbatch(self, device_index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        """Before forward and backward of one microbatch.

        device_index: which of this process's devices.
        is_last: whether it is that device's last microbatch in this step.
        """

    def train(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        """Return function(model, *arguments). Its backward pass comes before end_microbatch()."""
        return function(self.models[device_index], *arguments)

    def end_microbatch(self, device_index: int, microbatch: MicroBatch) -> None:
        """After the backward pass of a microbatch."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last microbatch: leave the sum over all devices in the first replica's
        gradients.
        """

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """After reduce(): whether the loss of this process's microbatches gave this parameter of
        the first replica a gradient.
        """
        return parameter.grad is not None

    def norm(
        self, _trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """The norm of the whole gradient; float64, the same on every rank.

        gradients: those of the parameters' views, which are this process's parts.
        """
        return norm_of(gradients)

    def sync_replicas(self) -> None:
        """After an update, or change(): give the other replicas of this process the new weights."""

    # Outside of a step:

    def call(self, device_index: int, function: Callable[..., T], *arguments: object) -> T:
        """Return function(model, *arguments), outside of training. Where weights are sharded, all
        ranks call it together.
        """
        return function(self.models[device_index], *arguments)

    def change(self, function: Callable[..., None], *arguments: object) -> None:
        """Call function(model, *arguments), which may change weights and buffers. Every process
        calls it alike, and sync_replicas() follows.
        """
        function(self.models[0], *arguments)

    def leaves(self, device_index: int) -> dict[str, nn.Parameter]:
        """The tensors to which a backward pass gives the gradients of trained parameters, by name;
        of a sharded model those that have been gathered.
        """
        named = self.models[device_index].named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The first replica's parameters, by name, each a whole tensor of its own. Every process
        takes them all, one after another.
        """
        for name, parameter in self.models[0].named_parameters():
            yield name, parameter.detach().clone()

    def reset(self) -> None:
        """Before the first step, and where weights were moved: forget what trials have gathered or
        learnt.
        """
        for forget in self.caches:
            forget()

    def close(self) -> None: ...

    # What an optimizer and a checkpoint ask about parts of tensors:

    def sum_over_parts(
        self, _params: Sequence[OptimizerParam], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """For each parameter, the sum of the values that its parts gave, over the processes that
        hold the parts.

        values: this process's values, a vector for each parameter; float64, on the device of its
            view.
        """
        return list(values)

    def map_whole(
        self,
        _params: Sequence[OptimizerParam],
        matrices: Sequence[torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """For each matrix, its number and this process's part of function(whole matrix), in any
        order. One of the processes that have copies or parts of a matrix computes the whole result.

        matrices: this process's parts, which lie as the parameters' views do.
        function: takes a matrix, or a stack of them, and returns one of the same shape.
        """
        if self._comm.group is None:
            return ((number, function(matrix)) for number, matrix in enumerate(matrices))
        from samecurve.torch_engine.whole_matrices import map_copies, meeting_place

        device = matrices[0].device if matrices else self._devices[0]
        return map_copies(self._comm, matrices, function, meet=meeting_place(self._plan, device))

    def put_together(
        self, _shards: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The arrays that this process puts together: the number of each, and the whole. Few are
        whole at the same time. All processes with the parts call it together.

        shards: this process's part of each array, and the shape of the whole
        """
        return iter(())  # nothing is cut

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the whole tensor, and where this process's part begins in it."""
        return tuple(tensor.shape), (0,) * tensor.ndim

    def own_part(self, _parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole parameter, or gradient of it, that this process holds."""
        return whole

    def replica_index(self, _tensor: torch.Tensor) -> tuple[int, int]:
        """The number of this process among those that hold the same part, and how many they are."""
        return self._comm.rank, self._comm.world_size


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of several arrays together; float64."""
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - public nowhere
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms).double())
    return norm


# name -> module:class, imported when it is used; "" is the base class, as it is
STRATEGIES: Mapping[str, str] = {
    "single": "",
    "dp": "replicated:Replicated",
    "ddp": "replicated:Replicated",
    "fsdp": "sharded.strategy:Sharded",
    "hsdp": "sharded.strategy:Sharded",
}


def make_strategy(plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> Strategy:
    """The plan's strategy, for these devices of this process."""
    place = STRATEGIES[plan.layout.strategy]
    if plan.compute.reducer == "tree":  # which the base class has no reducer for
        place = place or STRATEGIES["dp"]
    if not place:
        return Strategy(plan, comm, devices)
    module, _, name = place.partition(":")
    kind: type[Strategy] = getattr(import_module(f"{__package__}.{module}"), name)
    return kind(plan, comm, devices)
