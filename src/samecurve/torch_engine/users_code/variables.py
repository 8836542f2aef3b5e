"""Variables of the user's code that lie in no object: globals of its files, class variables, what
closures and default arguments hold, attributes of functions, caches of functools, context
variables, and variables of the environment that it names.

Each place is a mapping from names to values, by a path that is shown to the user:
"variable my_task.py:Net".
"""

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from samecurve.torch_engine.users_code import VARIABLE, kind_of
from samecurve.torch_engine.users_code.positions import has_cache

# Any: values of a user's variables
Place = MutableMapping[str, Any]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CODE = (ModuleType, type, FunctionType, MethodType, staticmethod, classmethod, property)


class _Names(Place):
    """Names of a module or a class whose values are data.

    Of a context variable it has the value.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        write: Callable[[str, Any], object],
        delete: Callable[[str], object],
    ) -> None:
        self._values, self._write, self._delete = values, write, delete

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value.get() if isinstance(value, ContextVar) else value

    def __setitem__(self, name: str, value: Any) -> None:
        old = self._values.get(name)
        if isinstance(old, ContextVar):
            old.set(value)
        elif old is not value:  # a class lets nobody set what it has
            self._write(name, value)

    def __delitem__(self, name: str) -> None:
        if not isinstance(self._values[name], ContextVar):  # what it was set to stays
            self._delete(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in list(self._values.items()) if _is_data(name, value))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(Place):
    """The variables of a closure."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name, cell in self._cells.items() if _holds_data(cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Environment(Place):
    """Some variables of the environment."""

    def __init__(self, names: set[str]) -> None:
        self._names = sorted(names)

    def __getitem__(self, name: str) -> str | int:
        text = os.environ[name]
        return int(text) if text.isdecimal() else text  # it may count

    def __setitem__(self, name: str, value: object) -> None:
        os.environ[name] = str(value)

    def __delitem__(self, name: str) -> None:
        del os.environ[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in os.environ)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def variables(model: nn.Module, task: object) -> dict[str, Place]:
    """The places of all variables that the user's code may change, by path."""
    walk = _Walk()
    for part in (task, *model.modules()):
        for kind in type(part).__mro__:
            walk.visit_class(kind)
        for value in list(vars(part).values()) if hasattr(part, "__dict__") else ():
            walk.visit(value)
        for name in _HOOKS:
            for hook in dict(getattr(part, name, {})).values():
                walk.visit(hook)
    if named := {name for name in walk.words if name.isupper()}:
        walk.places[f"{VARIABLE}os.environ"] = _Environment(named)
    return walk.places


def shown(name: str) -> str:
    """An attribute, or a variable, in words. name: its full name"""
    return name if name.startswith(VARIABLE) else f"attribute {name}"


class _Walk:
    """A walk over functions and classes of the user's files.

    words: texts that the functions name
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.words: set[str] = set()
        self._seen: set[int] = set()

    def visit(self, value: Any) -> None:
        """A value that may be code."""
        value = _unwrapped(value)
        if isinstance(value, FunctionType):
            self.visit_function(value)
        elif isinstance(value, type):
            self.visit_class(value)

    def visit_class(self, kind: type) -> None:
        values = list(vars(kind).values())
        functions = [one for one in map(_unwrapped, values) if isinstance(one, FunctionType)]
        if id(kind) in self._seen or not any(map(_is_users, functions)):
            return
        self._seen.add(id(kind))
        path = f"{VARIABLE}{_file_of(functions[0])}:{kind.__qualname__.replace('<locals>.', '')}"
        self.places[path] = _Names(vars(kind), partial(setattr, kind), partial(delattr, kind))
        for value in values:
            self.visit(value)

    def visit_function(self, function: FunctionType) -> None:
        if id(function) in self._seen or not _is_users(function):
            return
        self._seen.add(id(function))
        self.words |= _texts_in(function.__code__)
        path = f"{VARIABLE}{_file_of(function)}:{function.__qualname__.replace('<locals>.', '')}"
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            self._add(path, _Cells(cells))
        if function.__defaults__ or function.__kwdefaults__:
            self._add(path, _defaults_of(function))
        self._add(path, function.__dict__)
        for cell in cells.values():
            with suppress(ValueError):  # nothing is in it
                self.visit(cell.cell_contents)
        self._visit_globals(function)

    def _add(self, path: str, place: Place) -> None:
        """Each place has a path of its own: a function may have several places, or a twin."""
        number, given = 2, path
        while path in self.places:
            path, number = f"{given}#{number}", number + 1
        self.places[path] = place

    def _visit_globals(self, function: FunctionType) -> None:
        values = function.__globals__
        if id(values) in self._seen:
            return
        self._seen.add(id(values))
        path = f"{VARIABLE}{_file_of(function)}"
        self.places[path] = _Names(values, values.__setitem__, values.__delitem__)
        for value in list(values.values()):
            self.visit(value)


def _unwrapped(value: Any) -> Any:
    """The function in a method, a partial or another wrapper; else the value."""
    for name in ("__func__", "func", "fget", "__wrapped__"):
        inner = vars(value).get(name) if hasattr(value, "__dict__") else None
        inner = inner or (getattr(value, name, None) if type(value) in _WRAPPERS else None)
        if isinstance(inner, FunctionType | MethodType | partial):
            return _unwrapped(inner)
    return value


_WRAPPERS = {MethodType, staticmethod, classmethod, property, partial}


def _is_users(function: FunctionType) -> bool:
    return kind_of(function.__code__.co_filename) == "users"


def _file_of(function: FunctionType) -> str:
    return Path(function.__code__.co_filename).name


def _defaults_of(function: FunctionType) -> Place:
    """Values of arguments that are not given; only what is in them can change."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})


def _texts_in(code: CodeType) -> set[str]:
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            texts |= _texts_in(constant)
    return texts


def _is_data(name: str, value: object) -> bool:
    if name.startswith("__") or isinstance(value, _CODE):
        return False
    if isinstance(value, ContextVar):
        try:
            value.get()
        except LookupError:
            return False
        return True
    return has_cache(value) or not callable(value)


def _holds_data(cell: CellType) -> bool:
    try:
        return _is_data("", cell.cell_contents)
    except ValueError:  # nothing is in it
        return False
