"""A trained parameter as an optimizer sees it: real numbers, this process's part of them."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class OptimizerParam:
    """A trained parameter and the real, local values of it that the optimizer sees: the parameter
    itself, unless it is complex or sharded.
    """

    name: str
    parameter: nn.Parameter
    view: nn.Parameter

    def refresh(self) -> None:
        """Let the optimizer see this step's gradient (and the values, which a strategy may have
        moved).
        """
        if self.view is not self.parameter:
            self.view.data = local_view(self.parameter.detach())
            self.view.grad = (
                None if self.parameter.grad is None else local_view(self.parameter.grad)
            )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor.

    That class takes a second to import; where it was not, nothing is one.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_view(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, complex values as pairs of real ones; no copy."""
    distributed: Any = tensor  # a DTensor, where it is sharded
    shard: torch.Tensor = distributed.to_local() if is_sharded(tensor) else tensor
    return torch.view_as_real(shard) if shard.is_complex() else shard


def optimizer_params(model: nn.Module) -> list[OptimizerParam]:
    """The parameters of a model that are trained, as an optimizer sees them."""
    params = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            view = parameter
            if is_sharded(parameter) or parameter.is_complex():
                view = nn.Parameter(local_view(parameter.detach()))
            params.append(OptimizerParam(name, parameter, view))
    return params
