"""What a forward pass may leave behind: buffers, attributes of the model and of the task, and the
states of random generators, noted before it and put back afterwards.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from samecurve.torch_engine.split_check.kept_values import names_in, spaces

_CONTAINERS = (list, dict, set, deque)
_LISTS = (list, deque)
_LAST = 100  # items of one that grows
_NUMBERS = (int, float)
_MOST_BYTES, _MOST_ITEMS = 1 << 20, 1000  # of what is copied: a task may hold its data
Generators = dict[str, Any]  # state by name


class Buffers:
    """The buffers of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = dict(model.named_buffers())
        self._versions = {name: version(tensor) for name, tensor in self._tensors.items()}
        self._values = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def moved(self) -> dict[str, torch.Tensor]:
        """Copies of those that have other values now."""
        return {
            name: tensor.clone()
            for name, tensor in self._model.named_buffers()
            if not (self._is_untouched(name, tensor) or _equal(tensor, self._values.get(name)))
        }

    def put_back(self, names: Sequence[str] | None = None) -> None:
        """names: only these; None: all."""
        for name, now in list(self._model.named_buffers()):
            if (names is None or name in names) and now is not self._tensors.get(name):
                owner = _owner(self._model, name)
                setattr(owner, name.rpartition(".")[2], self._tensors.get(name))
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if names is not None and name not in names:
                    continue
                if version(tensor) != self._versions[name]:
                    if tensor.shape != self._values[name].shape:
                        tensor.resize_(self._values[name].shape)
                    tensor.copy_(self._values[name])
                    self._versions[name] = version(tensor)

    def _is_untouched(self, name: str, tensor: torch.Tensor) -> bool:
        return self._tensors.get(name) is tensor and self._versions[name] == version(tensor)


class Attributes:
    """Attributes of a model's modules and of a task's object, and of objects within them; variables
    of their classes, of the user's modules and of functions around their methods.
    """

    def __init__(self, model: nn.Module, task: object) -> None:
        self._spaces = dict(spaces(model, task))
        self._before = {path: _copied(space) for path, space in self._spaces.items()}
        self._last_items: dict[str, list[Any]] = {}  # of lists that grow

    def changed(self) -> list[str]:
        """Names of those that have other values now."""
        return [
            full
            for full, space, name in self._each()
            if not _same(space[name], self._before[full.rpartition(".")[0]].get(name, _MISSING))
        ]

    def numbers(self) -> dict[str, float]:
        """Those that are numbers, or lists by their length, and are others than before, or were not
        there.
        """
        changed, numbers = set(self.changed()), {}
        for full, space, name in self._each():
            value = _as_number(space[name]) if full in changed else None
            if value is not None:
                numbers[full] = value
                if isinstance(space[name], _LISTS):
                    self._last_items[full] = list(space[name])[-_LAST:]
        return numbers

    def values(self) -> dict[str, object]:
        """Copies of those that have other values now."""
        changed = set(self.changed())
        return {
            full: _kept_value(space[name]) for full, space, name in self._each() if full in changed
        }

    def advance(self, counters: Mapping[str, tuple[float, float]]) -> None:
        """Give numbers, by name, the value that they have had, and so much more."""
        for full, (value, more) in counters.items():
            path, _, name = full.rpartition(".")
            space = self._spaces.get(path, {})
            old = space.get(name)
            if isinstance(old, torch.Tensor):
                old.fill_(value + more)
            elif isinstance(old, _LISTS):
                items = self._last_items[full]
                old.extend(islice(cycle(items), int(value + more) - len(old)))
            elif path in self._spaces:
                whole = float(value).is_integer() and float(more).is_integer()
                space[name] = int(value + more) if whole else value + more

    def read(self, full: str) -> object:
        """One of them, by name, as something that can be compared."""
        path, _, name = full.rpartition(".")
        value = self._spaces.get(path, {}).get(name, _MISSING)
        if isinstance(value, torch.Tensor):
            return id(value), version(value)
        return list(_items(value)) if isinstance(value, _CONTAINERS) else value

    def _each(self) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        """(full name, the attributes among which it is, its name there)."""
        for path, space in self._spaces.items():
            for name in names_in(space):
                yield f"{path}.{name}", space, name

    def put_back(self) -> None:
        for path, space in self._spaces.items():
            for name in names_in(space):
                if name not in self._before[path]:
                    del space[name]
            for name, (value, content) in self._before[path].items():
                if _same(space.get(name, _MISSING), (value, content)):
                    continue
                space[name] = value
                _refill(value, content)

    def generators(self) -> Iterator[tuple[str, Any]]:
        """Random generators among them, by name."""
        kinds = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
        for full, space, name in self._each():
            if isinstance(space[name], kinds):
                yield full, space[name]


@contextmanager
def attributes_kept(task: object) -> Iterator[None]:
    """What is changed meanwhile of a task, and of the user's modules, is as before afterwards."""
    attributes = Attributes(nn.Module(), task)
    try:
        yield
    finally:
        attributes.put_back()


class GeneratorStates:
    """torch's, numpy's and Python's generators, and those that attributes hold."""

    def __init__(self, attributes: Attributes, devices: Sequence[torch.device]) -> None:
        self._own = dict(attributes.generators())
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._before = self.states()

    def states(self) -> Generators:
        states: Generators = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "Python": random.getstate(),
        }
        for device in self._cuda:
            states[f"torch on {device}"] = torch.cuda.get_rng_state(device)
        return states | {name: _state(generator) for name, generator in self._own.items()}

    @property
    def owned(self) -> list[object]:
        """Those that attributes hold."""
        return list(self._own.values())

    def of_host(self) -> object:
        """Of those that are not torch's, as something that can be compared."""
        own = {
            name: str(_state(generator))
            for name, generator in self._own.items()
            if not isinstance(generator, torch.Generator)
        }
        return str(np.random.get_state(legacy=False)), random.getstate(), own

    def moved(self) -> list[str]:
        now = self.states()
        return [name for name, state in self._before.items() if not _alike(state, now[name])]

    def put_back(self) -> None:
        before = self._before
        torch.set_rng_state(before["torch"])
        np.random.set_state(before["numpy"])
        random.setstate(before["Python"])
        for device in self._cuda:
            torch.cuda.set_rng_state(before[f"torch on {device}"], device)
        for name, generator in self._own.items():
            _set_state(generator, before[name])


class _Missing:
    """What an attribute had before it was made."""


_MISSING = _Missing()


def _copied(space: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """name -> (the value itself, a copy of what it holds)."""
    return {name: (space[name], _content(space[name])) for name in names_in(space)}


def _content(value: object) -> Any:
    """None: it is known by its identity alone."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS:
        return list(_items(value))
    return None


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else value


def _same(value: object, before: Any) -> bool:
    """Whether a value is what (value, content) noted of it."""
    if isinstance(value, _Missing) or isinstance(before, _Missing):
        return value is before
    old, content = before
    if content is None:
        return value is old or _plainly_equal(value, old)
    if isinstance(value, torch.Tensor):
        return isinstance(old, torch.Tensor) and _equal(value.detach(), content)
    if isinstance(value, np.ndarray):
        return isinstance(old, np.ndarray) and np.array_equal(value, content)
    if value is old:
        items = list(_items(value))
        return len(items) == len(content) and all(map(_plainly_equal, items, content))
    return False


def _kept_value(value: Any) -> Any:
    content = _content(value)
    return value if content is None else content


def plainly_equal(one: object, other: object) -> bool:
    """Whether two values of attributes are the same, as far as that can be seen."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_plainly_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return _plainly_equal(one, other)


def _plainly_equal(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_plainly_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _equal(one.detach(), other.detach())
    plain = (int, float, complex, str, bytes, type(None))
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _refill(value: Any, content: Any) -> None:
    """Give back what it held, in place."""
    if content is None:
        return
    if isinstance(value, torch.Tensor):
        if value.shape == content.shape:
            with torch.no_grad():
                value.detach().copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        fill: Callable[[Any], None] = value.extend if isinstance(value, deque) else value.update
        fill(content)


def _as_number(value: object) -> float | None:
    if isinstance(value, _LISTS):
        return float(len(value)) if value else None
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and not value.requires_grad and not value.is_complex()
        return float(value) if is_one else None
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return float(value)
    return None


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device != other.device:
        return False
    same = one == other
    if one.is_floating_point():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def version(tensor: torch.Tensor) -> int:
    """Which counts up with every change in place."""
    return tensor._version  # noqa: SLF001 - public nowhere


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):  # numpy's: an array among numbers and words
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
