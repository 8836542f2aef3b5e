"""The calls of operations without a deterministic kernel on GPUs, noted as a loss is computed."""

import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samecurve.core.nondeterministic import OPERATIONS, Operation
from samecurve.core.system import KERNEL, PRODUCTS

_LIBRARIES = tuple(f"{path}/" for path in (*torch.__path__, KERNEL, PRODUCTS))


class NondeterministicCalls:
    """Notes such calls, and where they come from."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}  # an operation's words -> where it was called first

    @property
    def names(self) -> tuple[str, ...]:
        """The operations in the words of their users, each with the module or the line that calls
        it.
        """
        return tuple(
            f"{words} ({place})" if place else words for words, place in self._places.items()
        )

    def see(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note an operation, if it has no deterministic kernel on GPUs.

        operation: an overload of torch.ops, as a dispatch mode has it
        """
        row = _row_of(operation)
        if row is None or row.words in self._places:
            return
        names = [argument.name for argument in operation._schema.arguments]  # noqa: SLF001
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if row.in_backward and not any(map(_has_gradient, arguments.values())):
            return
        if row.only:
            name, values = row.only
            if _in_words(arguments.get(name)) not in values:
                return
        self._places[row.words] = _place_of_call()


@cache
def _row_of(operation: Any) -> Operation | None:
    """The row of an operation in the table; None: it has a deterministic kernel."""
    name, _, overload = str(operation).removeprefix("aten.").partition(".")
    name = name.removesuffix("_")
    names = {name, f"{name}.{overload}"}
    return next((row for row in OPERATIONS if row.called in names), None)


def _has_gradient(argument: Any) -> bool:
    is_trained = isinstance(argument, torch.Tensor) and argument.requires_grad
    return is_trained and torch.is_grad_enabled()


def _in_words(argument: Any) -> str:
    """An argument as the table has it."""
    if isinstance(argument, torch.Tensor):
        return "floats" if argument.is_floating_point() else "integers"
    return "none" if argument is None else str(argument)


def _place_of_call() -> str:
    """The module inside which an operation is called, by its path in the model; or else the line
    outside of torch and of this program; '': there is none.
    """
    line, modules = "", []
    for frame, number in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not line and not file.startswith((*_LIBRARIES, "<")):
            line = f"{Path(file).name}:{number}"
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            modules.append(module)
    if not modules:
        return line
    inner, outer = modules[0], modules[-1]
    paths = {module: path for path, module in outer.named_modules()}
    return paths.get(inner, "") or line
