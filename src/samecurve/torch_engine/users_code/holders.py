"""The places in which a user's code may keep something from one call to the next, by path.

These are attributes of the model's modules, of the task, and of objects and dicts within them; and
variables of the user's code that they reach: those of classes and closures, globals that functions
name, default arguments, functions' attributes, and results of functools.cache.

A tensor that a task keeps beside its model is trained by no optimizer, and no checkpoint saves a
large one: one that the loss depends on must be in the model (HeldByTask).
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.users_code import (
    equal,
    is_users,
    kind_of,
    names_read,
    place_of_method,
    users_code,
)

Holder = MutableMapping[str, Any]  # Any: the values of a user's attributes and variables
_DEPTH = 3  # of objects within objects
_MOST_NAMES = 16  # in a dict whose values are looked at one by one
_MOST_HOLDERS = 2000
_LIBRARIES = (
    "samecurve.",
    "samecurve_products.",
    "torch.",
    "numpy.",
    "builtins",
    "logging.",
)  # not looked into
# what nn.Module and this program keep in a module
_MODULE_NAMES = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward", "samecurve_site"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CACHE = functools._lru_cache_wrapper  # noqa: SLF001 - has no other name
_METHODS = (staticmethod, classmethod, MethodType)
_NO_VALUES = (type, FunctionType, BuiltinFunctionType, ModuleType)
_CODE = (type, FunctionType, property, functools.partial, ContextVar, _CACHE, *_METHODS)

_READERS = ("loss", "features", "batch_loss")
_MOST_COMPARED = 4096  # numbers of a tensor
# by path: the tensor, and a copy of some of its numbers
Contents = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Variables(Holder):
    """Variables that lie in no dictionary of their own.

    names: gives their names; at: the object, or the dictionary, and the name there
    """

    def __init__(
        self, names: Callable[[], Iterable[str]], at: Callable[[str], tuple[Any, str]]
    ) -> None:
        self._names, self._at = names, at

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._names()) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        owner, inner = self._at(name)
        try:
            return owner[inner] if isinstance(owner, dict) else getattr(owner, inner)
        except (AttributeError, ValueError):  # a cell without content
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        owner, inner = self._at(name)
        owner.update({inner: value}) if isinstance(owner, dict) else setattr(owner, inner, value)

    def __delitem__(self, name: str) -> None:
        owner, inner = self._at(name)
        owner.pop(inner) if isinstance(owner, dict) else delattr(owner, inner)


class _ContextValue:
    """The value of a context variable, as an attribute."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    @property
    def value(self) -> Any:
        return self.variable.get()

    @value.setter
    def value(self, value: Any) -> None:
        self.variable.set(value)


class _Cached:
    """The results that functools.cache has kept of a function: the function, or None for none.

    They can only be cleared, all of them.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    @property
    def results(self) -> Any:
        return self._function if self._function.cache_info().currsize else None

    @results.setter
    def results(self, value: Any) -> None:
        if value is None:
            self._function.cache_clear()


def holders(model: nn.Module, task: object) -> dict[str, Holder]:
    """All places by path, each once."""
    walk = _Walk()
    for name, module in model.named_modules():
        walk.visit(name or "model", module, 0)
    walk.visit("task", task, 0)
    walk.follow_code()
    return walk.found


class _Walk:
    """Goes through objects, then through the code that they reach."""

    def __init__(self) -> None:
        self.found: dict[str, Holder] = {}
        self._seen: set[int] = set()
        self._waiting: list[Any] = []  # classes and functions
        self._globals: dict[int, dict[str, None]] = {}  # names that are looked at, by module

    def _hold(self, path: str, holder: Holder) -> str:
        """Returns the path, with a number where two places would have one path."""
        unique, number = path, 2
        while unique in self.found:
            unique, number = f"{path} ({number})", number + 1
        self.found[unique] = holder
        return unique

    # --- objects

    def visit(self, path: str, value: object, depth: int) -> None:
        if depth > _DEPTH or not self._is_new(value):
            return
        holder = _dict_of(value)
        if holder is None:
            return
        path = self._hold(path, holder)
        if holder is value:  # a dict: what its values hold is not looked at
            return
        self._waiting.append(type(value))
        if isinstance(value, nn.Module):
            hooks = [holder.get(name, {}) for name in _HOOKS]
            self._waiting += [hook for each in hooks for hook in each.values()]
        for name in names_in(holder):
            self._visit_value(f"{path}.{name}", holder[name], depth)

    def _visit_value(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, nn.Module):
            for submodule, module in value.named_modules():
                self.visit(".".join(filter(None, (path, submodule))), module, depth + 1)
        elif isinstance(value, _CODE):
            self._waiting.append(value)
        elif isinstance(value, dict) or _is_users_object(value):
            self.visit(path, value, depth + 1)

    def _is_new(self, value: object) -> bool:
        is_new = id(value) not in self._seen and len(self.found) < _MOST_HOLDERS
        self._seen.add(id(value))
        return is_new

    # --- code

    def follow_code(self) -> None:
        while self._waiting:
            value = self._waiting.pop()
            value = value.__func__ if isinstance(value, _METHODS) else value
            if not self._is_new(value):
                continue
            if isinstance(value, type):
                for kind in value.__mro__:
                    if kind is value or self._is_new(kind):
                        self._enter_class(kind)
            elif isinstance(value, FunctionType) and users_code(value):
                self._enter_function(value)
            elif isinstance(value, _CACHE):
                self._enter_cache(value)
            elif isinstance(value, ContextVar):
                self._enter_context_variable(value)
            inner = (getattr(value, name, None) for name in ("__wrapped__", "func", "fget", "fset"))
            self._waiting += [one for one in inner if isinstance(one, _CODE)]

    def _enter_cache(self, cached: Any) -> None:
        outer, _, name = _name_of(cached).rpartition(".")
        if users_code(cached.__wrapped__):
            path = f"cached function {outer or _module_name(cached.__wrapped__.__globals__)}"
            self._hold(path, Variables(lambda: [name], lambda _: (_Cached(cached), "results")))

    def _enter_context_variable(self, variable: ContextVar[Any]) -> None:
        at = _ContextValue(variable), "value"
        with suppress(LookupError):  # no value can't be given back
            variable.get()
            self._hold("context variable", Variables(lambda: [variable.name], lambda _: at))

    def _enter_class(self, kind: type) -> None:
        is_data = hasattr(kind, "__getitem__") and not issubclass(kind, nn.Module)
        of_user = is_users(kind) or _is_users_module(sys.modules.get(kind.__module__))
        if is_data or not of_user:
            return
        variables = Variables(
            lambda: [name for name, value in [*vars(kind).items()] if _is_variable(name, value)],
            lambda name: (kind, name),
        )
        path = self._hold(f"class variable {_name_of(kind)}", variables)
        for name, value in list(vars(kind).items()):
            if not name.endswith("_data"):  # reads ahead in a thread of its own
                self._visit_value(f"{path}.{name}", value, 0)

    def _enter_function(self, function: FunctionType) -> None:
        name, code = _name_of(function), function.__code__
        self._hold(f"function attribute {name}", function.__dict__)
        of_cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        cells = {free: cell for free, cell in of_cells if self._is_new(cell)}
        if cells:
            variables = Variables(lambda: cells, lambda free: (cells[free], "cell_contents"))
            path = self._hold(f"closure variable {name}", variables)
            for free, value in variables.items():
                self._visit_value(f"{path}.{free}", value, 0)
        values = function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
        defaults = dict(zip(arguments, values, strict=True)) | (function.__kwdefaults__ or {})
        if any(isinstance(value, list | dict | set) for value in defaults.values()):
            self._hold(f"default argument {name}", defaults)
        names = _names_of(code)
        self._enter_globals(function.__globals__, names)
        modules = [function.__globals__.get(one) for one in names]
        for module in modules:
            if isinstance(module, ModuleType) and module is not sys.modules["builtins"]:
                self._enter_globals(vars(module), names)

    def _enter_globals(self, variables: dict[str, Any], names: list[str]) -> None:
        """variables: of a module; names: those that a function reads or writes"""
        looked_at = self._globals.get(id(variables))
        path = f"global variable {_module_name(variables)}"
        if looked_at is None:
            looked_at = self._globals[id(variables)] = {}
            # functions may be wrapped meanwhile, by torch or by this program
            names_of_values = lambda: (  # noqa: E731
                name for name in looked_at if not isinstance(variables.get(name), _NO_VALUES)
            )
            self._hold(path, Variables(names_of_values, lambda name: (variables, name)))
        for name in names:
            if name not in looked_at and not name.startswith("__"):
                looked_at[name] = None
                self._visit_value(f"{path}.{name}", variables.get(name), 0)


def described(name: str) -> str:
    """The full name of an attribute or variable, in words."""
    kind = name.partition(".")[0]
    return name if " " in kind else f"attribute {name}"


def _name_of(code: Any) -> str:
    return str(code.__qualname__).replace("<locals>.", "")


def _module_name(variables: Mapping[str, Any]) -> str:
    """The name of a module's file, else of the module. A task's file has another name in Python."""
    path = Path(variables.get("__file__") or str(variables.get("__name__")))
    return path.parent.name if path.stem == "__init__" else path.stem


def _names_of(code: CodeType) -> list[str]:
    """Names of globals and attributes in a function, and in functions within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names_of(one))]


def _is_variable(name: str, value: object) -> bool:
    """Whether a name in a class is no method or other descriptor."""
    return not name.startswith("__") and not hasattr(type(value), "__get__")


def _is_users_module(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and kind_of(file) == "users"


def _dict_of(value: object) -> dict[str, Any] | None:
    """The names and values that a value holds; None: it holds none that can be looked at."""
    if not isinstance(value, dict):
        return getattr(value, "__dict__", None)
    # a library's table of models imports a model when it is asked for one
    is_lazy = type(value).__getitem__ is not dict.__getitem__
    if is_lazy or len(value) > _MOST_NAMES:
        return None
    is_named = all(isinstance(name, str) and "." not in name for name in value)
    return value if is_named else None


def _is_users_object(value: object) -> bool:
    if isinstance(value, ModuleType) or (callable(value) and not is_users(type(value))):
        return False
    library = f"{type(value).__module__}.".startswith(_LIBRARIES)
    return not library and hasattr(value, "__dict__")


def names_in(holder: Mapping[str, Any]) -> list[str]:
    """Names of attributes, without weights, which each strategy lays out in its own way."""
    return [name for name in holder if name not in _MODULE_NAMES and not _has_weights(holder[name])]


def _has_weights(value: object) -> bool:
    items: Any = (value,)
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict):
        items = dict.values(value)
    return any(isinstance(item, nn.Parameter) for item in items)


class HeldByTask:
    """The tensors in a task's attributes that are not the model's.

    model: the model that the task made
    """

    def __init__(self, task: object, model: nn.Module) -> None:
        self._task = getattr(task, "task", task)
        self._of_model = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def refuse_learned(self) -> None:
        """Call it after a backward pass.

        UserError: a tensor of the task has a gradient, and nobody would train it.
        """
        for path, tensor in self._tensors():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                raise UserError(
                    f"self.{path} is no part of what model() returns, so nobody trains it, and the"
                    " loss has a gradient for it",
                    "make it a submodule of the model (loss may call parts of it: model.head(x));"
                    " requires_grad_(False), where it is to stay as it is",
                    place_of_method(self._task, "loss"),
                )

    def contents(self) -> Contents:
        return {path: (tensor, _some_numbers(tensor)) for path, tensor in self._tensors()}

    def paths_of(self, dtype: torch.dtype) -> list[str]:
        """The tensors of a number format, by path."""
        return [path for path, tensor in self._tensors() if tensor.dtype == dtype]

    def refuse_changed(self, before: Contents, method: str) -> None:
        """Call it after a method of the task, with the contents from before.

        UserError: the method has changed a tensor of the task that the loss reads.
        """
        read = {name for reader in _READERS for name in names_read(self._task, reader)}
        for path, (tensor, numbers) in self.contents().items():
            if path.partition(".")[0] not in read:
                continue
            old, old_numbers = before.get(path, (None, None))
            if tensor is not old or not equal(numbers, old_numbers):
                raise UserError(
                    f"{method}() changes self.{path}, which the loss reads: what a task keeps is"
                    " in no checkpoint, so a resumed run would give another curve",
                    "keep it in the model: a submodule with requires_grad_(False), or"
                    " register_buffer(), in what model() returns",
                    place_of_method(self._task, method),
                )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by path, without those of the model."""
        for path, tensor in tensors_within("", getattr(self._task, "__dict__", {}), _DEPTH):
            if id(tensor) not in self._of_model:
                yield path, tensor


def _some_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of up to 4096 numbers, spread over the tensor: a change that is written through
    `.data` is seen by its values only, and a copy of a whole teacher may have no room.
    """
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.flatten()
    return flat[:: -(-len(flat) // _MOST_COMPARED) or 1].clone()


def tensors_within(path: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value by path: in modules, in dicts, lists and tuples so deep."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{path}.{name}", tensor
    elif depth and isinstance(value, dict | list | tuple):
        named = value if isinstance(value, dict) else dict(enumerate(value))
        for key, inner in named.items():
            yield from tensors_within(f"{path}.{key}".lstrip("."), inner, depth - 1)
