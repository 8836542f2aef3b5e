"""Side effects of a forward pass: changed buffers, attributes and states of random generators.

Each class notes its part when it is made, tells what has changed since, and puts it back.
Attributes are those of the model's modules, of the task, and of objects and dicts within them;
beside them the variables of the user's code (variables.py).
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from collections.abc import Iterator as Iterated
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from samecurve.errors import RunError
from samecurve.torch_engine.users_code import VARIABLE, has_users_code
from samecurve.torch_engine.users_code.positions import (
    Generator,
    Iterator,
    has_cache,
    made_again,
    position_of,
)

if TYPE_CHECKING:
    from samecurve.torch_engine.step.setup import EngineSetup

# Any: attributes of a user's objects
Attribute = dict[str, Any]  # name -> value, as an object or a dict holds them
_DEPTH = 3  # of objects within objects
_MOST_NAMES = 16  # in a dict whose values are looked at one by one
_MOST_BYTES, _MOST_ITEMS = 1 << 20, 1000  # of a value that is copied: a task may hold its data
FAR = 1000  # microbatches, after which the value of a counter is tried
_LAST = 100  # items of a growing list, which are repeated to make it longer
_LIBRARIES = ("samecurve.", "torch.", "numpy.", "builtins")  # whose objects are not looked into
# what nn.Module and this program keep in a module
_MODULE_NAMES = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward", "samecurve_site"}
_GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class Buffers:
    """The buffers of a model, by name. Their values are compared: a change that is written through
    `.data` leaves no other trace. With them go the weights that a pass has frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = dict(model.named_buffers())
        self._values = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]

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
        for weight in self._trained if names is None else ():
            if not weight.requires_grad:
                weight.requires_grad_(True)
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
    growth: by how much the number grows in one pass
    """

    value: Any
    growth: float


class Attributes:
    """Attributes of a model's modules and of a task, and of objects and dicts within them."""

    def __init__(self, model: nn.Module, task: object) -> None:
        self._holders = dict(_holders(model, task))
        # memory of weights, of which an attribute may be a view (nn.utils.spectral_norm)
        self._weights = set(filter(None, map(_memory_of, model.parameters())))
        self._places: dict[str, tuple[str, str]] = {}  # path and name, by full name
        self._before = {
            path: {name: (holder[name], _snapshot(holder[name])) for name in _names_in(holder)}
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
        holder[name] = value

    def _holder_of(self, full: str) -> tuple[MutableMapping[str, Any], str]:
        """As _find(), for an attribute that may not be there yet.

        KeyError: nothing holds it.
        """
        paths = [path for path in self._holders if full.startswith((f"{path}.", f"{path}["))]
        path = max(paths, key=len, default="")
        rest = full.removeprefix(path)
        return self._holders[path], rest[2:-2] if rest.startswith("[") else rest[1:]

    def advance(self, counters: Mapping[str, Counter], passes: int = FAR) -> None:
        """Give each counter the value that it has after so many more microbatches."""
        for full, (value, growth) in counters.items():
            holder, name = self._find(full)
            old, number, ahead = holder.get(name), _number(value), growth * passes
            assert number is not None
            if isinstance(old, torch.Tensor):
                old.fill_(number + ahead)
            elif isinstance(old, list | deque):
                old.extend(islice(cycle(list(value)[-_LAST:]), int(number + ahead) - len(old)))
            else:
                whole = number.is_integer() and ahead.is_integer()
                holder[name] = int(number + ahead) if whole else number + ahead

    def put_back(self, names: Collection[str] | None = None) -> None:
        """names: which attributes, by full name; None: all."""
        for path, holder in self._holders.items():
            before = self._before[path]
            for name in {**before, **dict.fromkeys(_names_in(holder))}:
                if names is not None and _full_name(path, name) not in names:
                    continue
                if name not in before:
                    del holder[name]
                    continue
                value, content = before[name]
                if name in holder and equal(_snapshot(holder[name]), content):
                    continue
                if isinstance(content, Iterator):
                    value = made_again(content)
                    before[name] = value, content
                holder[name] = value
                if _memory_of(value) not in self._weights:
                    _refill(value, content)

    def generators(self) -> dict[str, Any]:
        """Random generators among the attributes, by full name."""
        return {full: value for full, value, _ in self._each() if isinstance(value, _GENERATORS)}

    def _each(self) -> Iterated[tuple[str, Any, tuple[Any, Any] | None]]:
        """Full name, value, and the value and its copy from before; None: it is new."""
        for path, holder in self._holders.items():
            for name in _names_in(holder):
                full = _full_name(path, name)
                self._places[full] = path, name
                yield full, holder[name], self._before[path].get(name)

    def _find(self, full: str) -> tuple[MutableMapping[str, Any], str]:
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
            counters[name] = Counter(value, number - before)
    return counters


@contextmanager
def attributes_kept(task: object) -> Iterated[None]:
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


@contextmanager
def undone(setup: "EngineSetup") -> Iterated[None]:
    """Put back what forward passes inside of it change beside gradients, on this process's devices.

    RunError: something is not as it was.
    """
    task = getattr(setup.task, "task", setup.task)
    noted: list[Attributes | Buffers | GeneratorStates] = []
    models = setup.strategy.models
    for model, device in zip(models, setup.devices[: len(models)], strict=True):
        attributes = Attributes(model, task)
        noted += [GeneratorStates(device, attributes.generators()), Buffers(model), attributes]
    try:
        yield
    finally:
        for each in noted:
            each.put_back()
    left = [name for each in noted for name in each.changed() if not name.startswith(VARIABLE)]
    goes_on = {  # a generator never goes back
        name
        for each in noted
        if isinstance(each, Attributes)
        for name, value in each.changed().items()
        if isinstance(value, Generator)
    }
    left = [name for name in left if name not in goes_on]
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


def equal(one: object, other: object) -> bool:
    """Whether two values are the same, as far as that can be seen."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _equal_tensors(one.detach(), other.detach())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque) and type(one) is type(other):
        items: Any = other
        if set(map(type, one)) == {int}:  # as the state of Python's generator: hundreds of numbers
            return bool(one == items)
        return len(one) == len(items) and all(map(equal, one, items))
    plain = (int, float, complex, str, bytes, set)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if not (_is_there(one) and _is_there(other)):
        return False
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers can be read: fsdp frees weights of which a module may keep a view,
    and reading such a view would end the process.
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0


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
        return value.detach().clone() if value.nbytes <= _MOST_BYTES and _is_there(value) else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_BYTES else value
    if isinstance(value, dict):  # items() of a subclass may import what it names
        return dict(dict.items(value)) if len(value) <= _MOST_ITEMS else value
    for kind in (list, set, deque):
        if isinstance(value, kind):
            return kind(value) if len(value) <= _MOST_ITEMS else value
    return position_of(value) or value


def _refill(value: Any, content: Any) -> None:
    """Give a changed tensor, array or container its content back, in place."""
    if content is value:
        return
    if has_cache(value):
        value.cache_clear()
    elif isinstance(value, torch.Tensor):
        if value.shape == content.shape and _is_there(value):
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


def _holders(model: nn.Module, task: object) -> Iterated[tuple[str, MutableMapping[str, Any]]]:
    """Every object and dict whose values are attributes, once, by path; the outer ones first."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield from _within(name or "model", module, seen, 0)
    yield from _within("task", task, seen, 0)
    if not has_users_code(task, model):
        return
    from samecurve.torch_engine.users_code.variables import variables

    for path, place in variables(model, task).items():
        yield path, place
        yield from _inside(path, place, seen, 0)


def _within(
    path: str, value: object, seen: set[int], depth: int
) -> Iterated[tuple[str, Attribute]]:
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    holder = _dict_of(value)
    if holder is None:
        return
    yield path, holder
    if holder is not value:  # what the values of a dict hold is not looked at
        yield from _inside(path, holder, seen, depth)


def _inside(
    path: str, holder: Mapping[str, Any], seen: set[int], depth: int
) -> Iterated[tuple[str, Attribute]]:
    """What the values of a holder hold."""
    for name in _names_in(holder):
        inner = holder[name]
        if isinstance(inner, nn.Module):
            for submodule, module in inner.named_modules():
                at = ".".join(filter(None, (path, name, submodule)))
                yield from _within(at, module, seen, depth + 1)
        elif isinstance(inner, dict) or _is_users_object(inner):
            yield from _within(f"{path}.{name}", inner, seen, depth + 1)


def _dict_of(value: object) -> Attribute | None:
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
    is_code = isinstance(value, type) or callable(value)
    library = f"{type(value).__module__}.".startswith(_LIBRARIES)
    return not (is_code or library) and hasattr(value, "__dict__")


def _names_in(holder: Mapping[str, Any]) -> list[str]:
    """Names of attributes, without weights, which each strategy lays out in its own way."""
    return [name for name in holder if name not in _MODULE_NAMES and not _has_weights(holder[name])]


def _has_weights(value: object) -> bool:
    items: Any = (value,)
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict):
        items = dict.values(value)
    return any(isinstance(item, nn.Parameter) for item in items)
