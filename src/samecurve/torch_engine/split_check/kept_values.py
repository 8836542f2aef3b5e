"""Where a forward pass may keep something: attributes of the model's modules, of the task and of
objects within them, variables of their classes, of the user's modules, and of functions around
their methods.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from samecurve.torch_engine.split_check.user_code import is_users

Space = MutableMapping[str, Any]  # values by name, which can be changed there
_DEPTH = 3  # objects within attributes of objects
_MOST_ITEMS = 16  # of a list or a dict whose items are looked at one by one
_OURS = ("samecurve.", "torch.", "numpy.", "builtins")  # whose objects are not looked into
# what nn.Module keeps for itself
_MODULE_NAMES = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward"}


def spaces(model: nn.Module, task: object) -> Iterator[tuple[str, Space]]:
    """(path, values by name), each once; those of an object before those within it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield from _within(name or "model", module, seen, 0)
    yield from _within("task", task, seen, 0)
    kinds = dict.fromkeys(chain.from_iterable(type(m).__mro__ for m in model.modules()))
    for kind in dict.fromkeys([*type(task).__mro__, *kinds]):
        yield from _of_class(kind, seen)


def names_in(space: Mapping[str, Any]) -> list[str]:
    """Without weights, which strategies lay out as they need them."""
    return [
        name
        for name in space
        if name not in _MODULE_NAMES and name != "samecurve_site" and not _has_weights(space[name])
    ]


def _has_weights(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, nn.Parameter) for item in value)
    if isinstance(value, dict):
        return any(isinstance(item, nn.Parameter) for item in dict.values(value))
    return isinstance(value, nn.Parameter)


def _within(path: str, holder: object, seen: set[int], depth: int) -> Iterator[tuple[str, Space]]:
    if id(holder) in seen or depth > _DEPTH:
        return
    seen.add(id(holder))
    space = getattr(holder, "__dict__", None)
    if not isinstance(space, dict):
        return
    yield path, space
    for name in names_in(space):
        value = space[name]
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                at = ".".join(filter(None, (path, name, inner)))
                yield from _within(at, module, seen, depth + 1)
        elif _has_attributes(value):
            yield from _within(f"{path}.{name}", value, seen, depth + 1)
        else:
            yield from _items(f"{path}.{name}", value, seen)


def _has_attributes(value: object) -> bool:
    kind = type(value)
    return (
        not isinstance(value, type)
        and not callable(value)
        and hasattr(value, "__dict__")
        and not f"{kind.__module__}.".startswith(_OURS)
    )


def _items(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, Space]]:
    """Those of a small list or dict."""
    if not isinstance(value, list | dict) or _is_lazy(value):
        return
    if len(value) > _MOST_ITEMS or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list):
        yield path, _ListSpace(value)
    elif all(isinstance(name, str) and "." not in name for name in value):
        yield path, value


def _is_lazy(value: list[Any] | dict[Any, Any]) -> bool:
    """Its items come into being, or fail to, as they are looked at: a library's table of models."""
    kind = list if isinstance(value, list) else dict
    return type(value).__getitem__ is not kind.__getitem__


def _of_class(kind: type, seen: set[int]) -> Iterator[tuple[str, Space]]:
    """Of the user's: its variables, and what its methods know by name."""
    methods = list(_functions(vars(kind).values()))
    if not methods or id(kind) in seen:
        return
    seen.add(id(kind))
    yield from _with_items(kind.__name__, _ClassSpace(kind), seen)
    for method in methods:
        yield from _of_function(f"{kind.__name__}.{method.__name__}", method, seen)


def _of_function(path: str, function: FunctionType, seen: set[int]) -> Iterator[tuple[str, Space]]:
    """Its attributes, the variables around it, and those of its module."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if vars(function):
        yield path, vars(function)
    if function.__closure__:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        yield from _with_items(path, _CellSpace(cells), seen)
    yield from _of_module(function.__globals__, seen)


def _of_module(variables: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, Space]]:
    """Of the user's, and of those that it imports."""
    file, name = variables.get("__file__"), str(variables.get("__name__"))
    is_session = file is None and name == "__main__"  # a notebook's, say
    if id(variables) in seen or not (is_session or (file and is_users(file))):
        return
    seen.add(id(variables))
    yield from _with_items(Path(file).stem if file else name, _ModuleSpace(variables), seen)
    values = list(variables.values())
    for value in values:
        if isinstance(value, ModuleType):
            yield from _of_module(vars(value), seen)
        elif isinstance(value, type):
            yield from _of_class(value, seen)
    for function in _functions(values):
        yield from _of_function(function.__name__, function, seen)


def _with_items(path: str, space: Space, seen: set[int]) -> Iterator[tuple[str, Space]]:
    """And what its lists, dicts and the user's own objects hold."""
    yield path, space
    for name, value in list(space.items()):
        if any(True for _ in _functions(vars(type(value)).values())) and _has_attributes(value):
            yield from _within(f"{path}.{name}", value, seen, 1)
        else:
            yield from _items(f"{path}.{name}", value, seen)


def _functions(values: Iterable[object]) -> Iterator[FunctionType]:
    """Those of the user's code."""
    for value in list(values):
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(inner, FunctionType) and is_users(inner.__code__.co_filename):
            yield inner


def _is_variable(name: str, value: object) -> bool:
    """Not a method, a class, a module, or what Python keeps for itself."""
    is_code = callable(value) or hasattr(value, "__get__") or isinstance(value, ModuleType)
    return not (is_code or name.startswith("__") or "." in name)


class _ListSpace(MutableMapping[str, Any]):
    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[int(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[int(name)] = value

    def __delitem__(self, name: str) -> None:
        del self._values[int(name) :]

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self._values)))

    def __len__(self) -> int:
        return len(self._values)


class _ModuleSpace(MutableMapping[str, Any]):
    """Variables of a module."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __delitem__(self, name: str) -> None:
        del self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return (n for n, value in list(self._variables.items()) if _is_variable(n, value))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _ClassSpace(MutableMapping[str, Any]):
    """Variables of a class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return (n for n, value in list(vars(self._kind).items()) if _is_variable(n, value))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _CellSpace(MutableMapping[str, Any]):
    """Variables around a function, as far as they have a value."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if self._is_variable(name))

    def _is_variable(self, name: str) -> bool:
        return name in self and _is_variable(name, self[name])

    def __contains__(self, name: object) -> bool:
        return name in self._cells and _has_value(self._cells[str(name)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _has_value(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
