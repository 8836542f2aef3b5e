"""Marks for torch.compile, made without importing torch._dynamo: that takes a second or two of
every rank's start, and only a model that is compiled needs it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import (
    _disable_dynamo,  # torch.compiler.disable, which imports it when the function is first called
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant(function: _Function) -> _Function:
    """As torch.compiler.assume_constant_result: what it gives is taken for a constant of the
    compiled program.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: _Function) -> _Function:
    """As torch.compiler.disable: a compiled program calls it as it is."""
    disabled: Any = _disable_dynamo(function)
    return cast("_Function", disabled)
