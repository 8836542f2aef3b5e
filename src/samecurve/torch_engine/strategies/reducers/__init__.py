"""How a step's gradients are added up, over the microbatches of a device and over all devices.

A reducer is one class and one entry in REDUCERS. The plan chooses it (core/planning/compute.py).
The base adds up in place, in one process: autograd adds the gradients of each microbatch to those
before it, and the devices of this process follow each other in their order.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies import norm_of


class Reducer:
    """Adds up the gradients of a step. The methods are called in their order here.

    replicas: by device of this process, the trained parameters
    """

    def __init__(self, plan: Plan, comm: Comm, replicas: Sequence[Sequence[nn.Parameter]]) -> None:
        self._plan, self._comm, self._replicas = plan, comm, replicas

    def begin_step(self, _num_microbatches: int) -> None:
        """Before a step: no gradient is left. num_microbatches: over all devices."""
        for parameters in self._replicas:
            clear(parameters)

    def begin_microbatch(self, device_index: int, microbatch: MicroBatch, *, is_last: bool) -> None:
        """Before a microbatch. is_last: whether it is this device's last one in this step."""

    def end_microbatch(self, device_index: int) -> None:
        """After the backward pass of a microbatch."""

    def reduce(self) -> None:
        """Leave the sum over all devices in the first replica's gradients."""
        first = self._replicas[0]
        for others in self._replicas[1:]:
            for parameter, other in zip(first, others, strict=True):
                if other.grad is None:
                    continue
                gradient = other.grad.to(parameter.device)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
                other.grad = None

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """After reduce(): whether this process's microbatches gave the parameter a gradient."""
        return parameter.grad is not None

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of the whole gradient; float64."""
        return norm_of(gradients)

    def close(self) -> None: ...


def clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


# by name, module:class of what adds up over several processes, and of what does it in one
REDUCERS: Mapping[str, tuple[str, str]] = {
    "tree": (f"{__name__}.tree:TreeOverRanks", f"{__name__}.tree:Tree"),
    "collective": (f"{__name__}.collective:Collective", f"{__name__}:Reducer"),
}


def make_reducer(plan: Plan, comm: Comm, replicas: Sequence[Sequence[nn.Parameter]]) -> Reducer:
    """The plan's reducer. replicas: by device of this process, the trained parameters."""
    over_ranks, in_process = REDUCERS[plan.compute.reducer]
    module, _, name = (in_process if comm.group is None else over_ranks).partition(":")
    kind: type[Reducer] = getattr(import_module(module), name)
    return kind(plan, comm, replicas)
