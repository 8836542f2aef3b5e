"""A model as strategies wrap it: around every call that a task makes with it.

A wrapper (DDP, FSDP) acts when its module is called. Were that the model, whatever a loss does
beside model(x) would pass it by: methods, submodules, weights that the loss reads. So what is
wrapped is the whole of what the task does with the model.
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
        """function(model, *arguments)."""
        return function(self.model, *arguments)
