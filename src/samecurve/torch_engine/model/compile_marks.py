"""Marks for torch.compile, made without importing torch._dynamo: that takes a second or two of
every rank's start, and only a model that is compiled needs it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

# torch.compiler.disable, which imports torch._dynamo when the function is first called
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant(function: _Function) -> _Function:
    """Do as torch.compiler.assume_constant_result: a compiled program takes the result for a
    constant.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def uncompiled(function: _Function) -> _Function:
    """Do as torch.compiler.disable: a compiled program calls the function as it is."""
    disabled: Any = _disable_dynamo(function)
    return cast("_Function", disabled)
