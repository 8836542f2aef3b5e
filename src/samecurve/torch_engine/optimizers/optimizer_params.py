"""The parameters that an optimizer is given: as it sees them (real numbers, this process's part of
them), and which of them are matrices of hidden layers, which muon is for.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from samecurve.torch_engine.model.model_setup import repeated_blocks


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
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor  # waits, where another thread is importing it

    return isinstance(tensor, DTensor)


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


def hidden_matrices(model: nn.Module) -> tuple[str, ...]:
    """Names of matrices, and of stacks of them (a mixture's experts), within the repeated blocks;
    of a model without such blocks, of all its layers.

    None is a weight of an embedding or a kernel of a convolution, and neither are the model's first
    and last arrays, its input and output, unless they lie in a block of several layers.
    """
    blocks = repeated_blocks(model)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    bare = {id(p) for block in blocks if not list(block.children()) for p in block.parameters()}
    others = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | _ConvNd)
        for p in module.parameters(recurse=False)
    }
    arrays = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    for _, p in arrays[:1] + arrays[-1:]:
        if id(p) not in in_blocks or id(p) in bare:
            others.add(id(p))
    matrices = [(name, p) for name, p in arrays if id(p) not in others and _is_matrix(p)]
    hidden = [name for name, p in matrices if id(p) in in_blocks]
    if not hidden:
        hidden = [name for name, p in matrices if p.ndim == 2]
    return tuple(hidden)


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is one, or a stack of several."""
    is_stack = parameter.ndim == 3 and min(parameter.shape) > 1
    return (parameter.ndim == 2 or is_stack) and not parameter.is_complex()
