"""Side effects of a forward pass: changed buffers, attributes and states of random generators.

Each class notes its part when it is made, tells what has changed since, and puts it back.
Attributes are those of the model's modules and of the task, and variables of the user's code
(holders.py).
"""

import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, cycle, islice
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from samecurve.errors import RunError
from samecurve.torch_engine.users_code import equal, is_there
from samecurve.torch_engine.users_code.holders import Holder, holders, names_in

if TYPE_CHECKING:
    from samecurve.torch_engine.step import EngineSetup

_MOST_BYTES, _MOST_ITEMS = 1 << 20, 1000  # of a value that is copied: a task may hold its data
_FAR = 1000  # microbatches, after which the value of a counter is tried
_MULTIPLE = 720720  # of all numbers up to 16
TURNS = 3  # values of a counter that are tried
_LAST = 100  # items of a growing list, which are repeated to make it longer
_GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class Buffers:
    """The buffers of a model, by name. Their values are compared: a change that is written through
    `.data` leaves no other trace.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = dict(model.named_buffers())
        self._values = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers whose values have changed."""
        return {
            name: tensor.clone()
            for name, tensor in self._model.named_buffers()
            if not equal(tensor, self._values.get(name))
        }

    def read(self, name: str) -> torch.Tensor:
        """A copy of one buffer, to be compared by equal()."""
        return self._model.get_buffer(name).clone()

    def put_back(self, names: Collection[str] | None = None) -> None:
        """names: which buffers; None: all."""
        for name, now in list(self._model.named_buffers()):
            if (names is None or name in names) and now is not self._tensors.get(name):
                path, _, attribute = name.rpartition(".")
                module = self._model.get_submodule(path)
                if name in self._tensors:
                    setattr(module, attribute, self._tensors[name])
                else:
                    delattr(module, attribute)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if names is not None and name not in names:
                    continue
                if not equal(tensor, self._values[name]):
                    if tensor.shape != self._values[name].shape:
                        tensor.resize_(self._values[name].shape)
                    tensor.copy_(self._values[name])


class Counter(NamedTuple):
    """A number, or a list's length, that grows with each forward pass.

    value: the attribute as the last forward pass left it
    ahead: by how much the number grows in many microbatches
    """

    value: Any
    ahead: float


class Position(str):
    """How far an iterator has gone, as text: a generator, itertools.cycle(). No copy of it can be
    made, so it can't be put back.
    """

    __slots__ = ()


class Attributes:
    """Attributes of a model's modules and of a task, and variables of the user's code.

    more: other places that are looked at, by path
    """

    def __init__(
        self, model: nn.Module, task: object, more: Mapping[str, Holder] | None = None
    ) -> None:
        self._holders = {**holders(model, task), **(more or {})}
        # memory of weights, of which an attribute may be a view (nn.utils.spectral_norm)
        self._weights = set(filter(None, map(_memory_of, model.parameters())))
        self._places: dict[str, tuple[str, str]] = {}  # path and name, by full name
        self._before = {
            path: {name: (holder[name], _snapshot(holder[name])) for name in names_in(holder)}
            for path, holder in self._holders.items()
        }

    def changed(self) -> dict[str, object]:
        """Copies of the attributes that are new or have other values, by full name."""
        changed = {}
        for full, value, before in self._each():
            now = _snapshot(value)
            if before is None or not equal(now, before[1]):
                changed[full] = now
        return changed

    def read(self, full: str) -> object:
        """A copy of one attribute, to be compared by equal()."""
        holder, name = self._find(full)
        return _snapshot(holder.get(name))

    def set(self, full: str, value: object) -> None:
        """Give an attribute a value, in place where a tensor or an array of that shape is there."""
        holder, name = self._holder_of(full)
        old = holder.get(name)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(old.device, old.dtype)
            if old.shape == value.shape:
                _refill(old, value)
                return
        if isinstance(old, count) and isinstance(value, int):
            value = count(value)
        if isinstance(old, dict | set | list | deque) and type(old) is type(value):
            _refill(old, value)
            return
        holder[name] = value

    def _holder_of(self, full: str) -> tuple[Holder, str]:
        """As _find(), for an attribute that may not be there yet.

        KeyError: nothing holds it.
        """
        paths = [path for path in self._holders if full.startswith((f"{path}.", f"{path}["))]
        path = max(paths, key=len, default="")
        rest = full.removeprefix(path)
        return self._holders[path], rest[2:-2] if rest.startswith("[") else rest[1:]

    def advance(self, counters: Mapping[str, Counter], turn: int = 0) -> None:
        """Give each counter the value that it has after many more microbatches.

        turn: which of TURNS values. By the second and the third, a whole number is about to become,
            or is, a multiple of all numbers up to 16: something happens at each ninth call, say.
        """
        for full, (value, ahead) in counters.items():
            holder, name = self._find(full)
            old, number = holder.get(name), _number(value)
            assert number is not None
            far = number + ahead
            is_small = isinstance(old, torch.Tensor) and old.itemsize < 4
            if turn and far.is_integer() and not (is_small or isinstance(old, list | deque)):
                far = ahead / _FAR * (_MULTIPLE - (turn == 1))
            if isinstance(old, count):
                holder[name] = count(int(far))
            elif isinstance(old, torch.Tensor):
                old.fill_(far)
            elif isinstance(old, list | deque):
                old.extend(islice(cycle(list(value)[-_LAST:]), int(far) - len(old)))
            else:
                holder[name] = int(far) if far.is_integer() and ahead.is_integer() else far

    def put_back(self, names: Collection[str] | None = None) -> None:
        """names: which attributes, by full name; None: all."""
        for path, holder in self._holders.items():
            before = self._before[path]
            for name in {**before, **dict.fromkeys(names_in(holder))}:
                if names is not None and _full_name(path, name) not in names:
                    continue
                if name not in before:
                    del holder[name]
                    continue
                value, content = before[name]
                if name in holder and equal(_snapshot(holder[name]), content):
                    continue
                can_count = isinstance(value, count) and not isinstance(content, Position)
                holder[name] = count(content) if can_count else value
                if _memory_of(value) not in self._weights:
                    _refill(value, content)

    def generators(self) -> dict[str, Any]:
        """Random generators among the attributes, by full name."""
        return {full: value for full, value, _ in self._each() if isinstance(value, _GENERATORS)}

    def _each(self) -> Iterator[tuple[str, Any, tuple[Any, Any] | None]]:
        """Full name, value, and the value and its copy from before; None: it is new."""
        for path, holder in self._holders.items():
            for name in names_in(holder):
                full = _full_name(path, name)
                self._places[full] = path, name
                yield full, holder[name], self._before[path].get(name)

    def _find(self, full: str) -> tuple[Holder, str]:
        """The holder of an attribute that has changed once, and the attribute's name there."""
        path, name = self._places[full]
        return self._holders[path], name


def _full_name(path: str, name: str) -> str:
    """The full name of an attribute; of a key with a dot, task.log['train.loss']."""
    return f"{path}[{name!r}]" if "." in str(name) else f"{path}.{name}"


def counters_in(first: Mapping[str, object], again: Mapping[str, object]) -> dict[str, Counter]:
    """Attributes that a second forward pass of the same samples moved on as numbers.

    first, again: Attributes.changed() after each of the two
    """
    counters = {}
    for name, value in again.items():
        number, before = _number(value), _number(first.get(name))
        if number is not None and before is not None and number != before:
            counters[name] = Counter(value, _FAR * (number - before))
    return counters


@contextmanager
def attributes_kept(task: object) -> Iterator[None]:
    """Put the attributes of a task back afterwards."""
    attributes = Attributes(nn.Module(), task)
    try:
        yield
    finally:
        attributes.put_back()


class GeneratorStates:
    """The states of the generators that a whole process shares, torch's, numpy's and Python's, and
    of others. Shared generators' numbers depend on the device, and on what was drawn before.

    device: where torch may draw, beside the host
    held: generators that attributes hold, by name
    """

    def __init__(self, device: torch.device, held: Mapping[str, Any] | None = None) -> None:
        held = held or {}
        self.held = list(held.values())
        self._access: dict[str, Access] = {
            "torch": (torch.get_rng_state, torch.set_rng_state),
            "numpy": (partial(np.random.get_state, legacy=False), np.random.set_state),
            "Python": (random.getstate, random.setstate),
        }
        if device.type == "cuda":
            self._access[f"torch on {device}"] = (
                partial(torch.cuda.get_rng_state, device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        self._access |= {name: access_of(generator) for name, generator in held.items()}
        self._of_torch = {
            name
            for name in self._access
            if name.startswith("torch") or isinstance(held.get(name), torch.Generator)
        }
        self._before = {name: read() for name, (read, _) in self._access.items()}

    def changed(self) -> list[str]:
        """Names of the generators that have drawn."""
        return [
            name
            for name, (read, _) in self._access.items()
            if not equal(read(), self._before[name])
        ]

    def put_back(self) -> None:
        for name, (_, write) in self._access.items():
            write(self._before[name])

    def read_host(self) -> object:
        """The states of the generators that are not torch's, to be compared by equal()."""
        return [
            str(read()) for name, (read, _) in self._access.items() if name not in self._of_torch
        ]


class Noted(NamedTuple):
    """All that a forward pass of one model may change beside gradients, as it was."""

    generators: GeneratorStates
    buffers: Buffers
    attributes: Attributes

    def put_back(self) -> None:
        for each in self:
            each.put_back()

    def changed(self) -> list[str]:
        """Names of what is not as it was, but for iterators: data may be read meanwhile."""
        attributes = self.attributes.changed()
        moved = {name for name, value in attributes.items() if isinstance(value, Position)}
        names = [*self.generators.changed(), *self.buffers.changed(), *attributes]
        return [name for name in names if name not in moved]


@contextmanager
def undone(setup: "EngineSetup") -> Iterator[Noted]:
    """Put back what forward passes inside of it change beside gradients, on this process's devices.
    Gives what was noted of the first device's model.

    RunError: something is not as it was.
    """
    task = getattr(setup.task, "task", setup.task)
    noted = []
    models = setup.strategy.models
    for model, device in zip(models, setup.devices[: len(models)], strict=True):
        attributes = Attributes(model, task)
        generators = GeneratorStates(device, attributes.generators())
        noted.append(Noted(generators, Buffers(model), attributes))
    try:
        yield noted[0]
    finally:
        for each in noted:
            each.put_back()
    left = [name for each in noted for name in each.changed()]
    if left:
        raise RunError(
            f"a trial of the loss has changed {left[0]}, and it could not be put back",
            "this is a fault of the program's own: please report it, with the task's code",
        )


Access = tuple[Callable[[], Any], Callable[[Any], object]]  # read and write a generator's state


def access_of(generator: Any) -> Access:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return partial(generator.get_state, legacy=False), generator.set_state


def _memory_of(value: object) -> int | None:
    """Where the memory of a tensor begins; None: it is none, or in shards, or has no memory."""
    if not isinstance(value, torch.Tensor) or type(value) not in {torch.Tensor, nn.Parameter}:
        return None
    is_strided = value.layout == torch.strided
    return value.untyped_storage().data_ptr() or None if is_strided else None


def _snapshot(value: Any) -> Any:
    """A copy of a small tensor, array or container; else the value itself."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.nbytes <= _MOST_BYTES and is_there(value) else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES else value
    if isinstance(value, dict):  # items() of a subclass may import what it names
        return dict(dict.items(value)) if len(value) <= _MOST_ITEMS else value
    for kind in (list, set, deque):
        if isinstance(value, kind):
            return kind(value) if len(value) <= _MOST_ITEMS else value
    if isinstance(value, count) and (number := re.fullmatch(r"count\((-?\d+)\)", repr(value))):
        return int(number[1])
    is_iterator = type(value).__module__ in {"builtins", "itertools"} and hasattr(value, "__next__")
    return _position(value) if is_iterator else value


def _position(iterator: Any) -> Position:
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        plain = (int, float, str)
        local = frame.f_locals if frame else {}
        values = {name: one if isinstance(one, plain) else id(one) for name, one in local.items()}
        return Position(f"{frame and frame.f_lasti} {values}")
    with suppress(TypeError, AttributeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.14 has this of fewer iterators
        return Position(_text_of_state(iterator.__reduce__()))
    return Position()


def _text_of_state(state: Any) -> str:
    """Numbers of an iterator's state, and how much it has kept."""
    if isinstance(state, tuple):
        return f"({', '.join(map(_text_of_state, state))})"
    if isinstance(state, list | dict | set):
        return f"{len(state)} items"
    if hasattr(state, "__next__"):
        return str(_position(state))
    return repr(state) if isinstance(state, int | float | str) else ""


def _refill(value: Any, content: Any) -> None:
    """Give a changed tensor, array or container its content back, in place."""
    if content is value:
        return
    if isinstance(value, torch.Tensor):
        if value.shape == content.shape and is_there(value):
            with torch.no_grad():
                value.detach().copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, dict | set | list | deque):
        value.clear()
        fill: Callable[[Any], None]
        fill = value.update if isinstance(value, dict | set) else value.extend
        fill(content)


def _number(value: object) -> float | None:
    """The value as a number, a list by its length; None: it is neither."""
    if isinstance(value, list | deque):
        return float(len(value)) if value else None
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and not value.requires_grad and not value.is_complex()
        return float(value) if is_one else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
