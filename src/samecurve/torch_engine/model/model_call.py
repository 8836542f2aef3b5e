"""The module that strategies wrap: a call of a task's function with the model.

A wrapper (DDP, FSDP) acts when its module is called. If the wrapped module were the model itself,
the wrapper would miss everything that a loss does beside model(x): methods, submodules, weights
that the loss reads. So strategies wrap a module whose forward pass is the task's whole function.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import nn

T = TypeVar("T")


class ModelCall(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], *arguments: object) -> T:
        """Return function(model, *arguments)."""
        return function(self.model, *arguments)
