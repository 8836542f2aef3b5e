"""What a forward pass changes of a model and a task is seen, and put back."""

import contextvars
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samecurve.torch_engine.users_code.side_effects import (
    Attributes,
    Buffers,
    GeneratorStates,
    counters_in,
    equal,
)


class Inner:
    def __init__(self) -> None:
        self.calls = 0


class Task:
    """Counts, in each way of objects; and in `shared`, a variable of the class."""

    shared = 0

    def __init__(self) -> None:
        self.number, self.inner, self.stats = 0, Inner(), {"calls": 0}
        self.seen: list[float] = []
        self.last: deque[float] = deque()
        self.tensor, self.array = torch.zeros(()), np.zeros(3)
        self.rng = np.random.default_rng(0)

    def loss(self) -> None:
        Task.shared += 1
        self.number += 1
        self.inner.calls += 1
        self.stats["calls"] += 1
        self.seen.append(1.0)
        self.last.append(1.0)
        self.tensor += 1
        self.array += 1
        self.new = self.number


SHARED = "variable test_side_effects.py:Task.shared"
COUNTERS = ("inner.calls", "last", "new", "number", "seen", "stats.calls", "tensor")


def test_attributes_that_change_are_named_and_put_back() -> None:
    task = Task()
    attributes = Attributes(nn.Linear(2, 2), task)
    seen, tensor = task.seen, task.tensor
    task.loss()
    names = {SHARED, *(f"task.{name}" for name in (*COUNTERS, "array"))}
    # a dict and what is in it
    assert attributes.changed().keys() - {"task.stats"} == names
    attributes.put_back()
    assert attributes.changed() == {}
    assert (task.number, task.inner.calls, task.stats) == (0, 0, {"calls": 0})
    assert not hasattr(task, "new")
    assert task.seen is seen
    assert task.tensor is tensor
    assert (len(seen), len(task.last), float(tensor), task.array.sum()) == (0, 0, 0, 0)


def test_what_counts_is_taken_a_thousand_microbatches_ahead() -> None:
    task = Task()
    attributes = Attributes(nn.Linear(2, 2), task)
    task.loss()
    first = attributes.changed()
    task.loss()
    counters = counters_in(first, attributes.changed())
    assert sorted(counters) == [*(f"task.{name}" for name in COUNTERS), SHARED]
    attributes.put_back()
    attributes.advance(counters)
    assert (task.number, task.inner.calls, task.stats, task.new) == (
        1002,
        1002,
        {"calls": 1002},
        1002,
    )
    assert (len(task.seen), len(task.last), float(task.tensor)) == (1002, 1002, 1002)
    assert Task.shared == 1002
    attributes.put_back()


TOLD = contextvars.ContextVar("TOLD", default=0)
FOUND: dict[str, int] = {}


@functools.cache
def cached(number: int) -> int:
    return number


def closure() -> Callable[[], None]:
    calls, turns = 0, itertools.cycle([1, 2, 3])

    def count() -> None:
        nonlocal calls
        calls += next(turns)

    return count


def kept(number: int, seen: list[int] = []) -> None:  # noqa: B006 - as people write it
    seen.append(number)
    marked: Any = kept
    marked.calls = number


class Elsewhere:
    """Counts where no attribute is."""

    def __init__(self) -> None:
        self.count, self.turns = closure(), itertools.count()
        self.steps = (number for number in range(9))

    def loss(self) -> None:
        self.count()
        next(self.turns)
        next(self.steps)
        kept(cached(len(FOUND)))
        TOLD.set(TOLD.get() + 1)
        FOUND[f"{len(FOUND)}"] = 1
        os.environ["TOLD"] = str(int(os.environ.get("TOLD", "0")) + 1)


def test_variables_of_the_users_code_are_named_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOLD", "4")
    task = Elsewhere()
    attributes = Attributes(nn.Linear(2, 2), task)
    task.loss()
    task.loss()
    here = "variable test_side_effects.py"
    assert sorted(attributes.changed()) == [
        *("task.steps", "task.turns", "variable os.environ.TOLD"),
        *(f"{here}.{name}" for name in ("FOUND", "FOUND.0", "FOUND.1", "TOLD", "cached")),
        *(f"{here}:closure.count.{name}" for name in ("calls", "turns")),
        *(f"{here}:kept#2.calls", f"{here}:kept.seen"),
    ]
    attributes.put_back()
    assert list(attributes.changed()) == ["task.steps"]  # a generator never goes back
    assert (TOLD.get(), FOUND, os.environ["TOLD"]) == (0, {}, "4")
    assert (next(task.turns), cached.cache_info().currsize) == (0, 0)
    task.loss()
    assert list(FOUND) == ["0"]
    attributes.put_back()


def test_generators_that_draw_are_named_and_put_back() -> None:
    task = Task()
    generators = GeneratorStates(
        torch.device("cpu"), Attributes(nn.Linear(2, 2), task).generators()
    )
    draws: dict[str, Any] = {
        "torch": lambda: torch.rand(2).tolist(),
        "numpy": np.random.rand,
        "task.rng": task.rng.random,
    }
    for name, draw in draws.items():
        number = draw()
        assert generators.changed() == [name]
        generators.put_back()
        assert (draw(), generators.changed()) == (number, [name])
        generators.put_back()
    assert generators.changed() == []


def test_a_buffer_of_another_shape_is_put_back() -> None:
    model = nn.BatchNorm1d(2)
    buffers = Buffers(model)
    model.running_mean = torch.ones(3)
    assert list(buffers.changed()) == ["running_mean"]
    buffers.put_back()
    assert torch.equal(model.running_mean, torch.zeros(2))
    assert buffers.changed() == {}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1, (2, "a")], [1, (2, "a")], True),
        ([1], (1,), False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (object(), object(), False),
    ],
)
def test_equal(one: object, other: object, *, same: bool) -> None:
    assert equal(one, other) == same


def test_a_view_whose_memory_was_freed_is_left_alone() -> None:
    """As a module may keep one of a weight that fsdp gathers and frees: reading it would end the
    process.
    """
    model, whole = nn.Linear(2, 2), torch.ones(4)
    model.kept = whole[1:]
    before = Attributes(model, object())
    whole.untyped_storage().resize_(0)
    assert before.changed()
    before.put_back()
    after = Attributes(model, object())
    assert not after.changed()
    after.put_back()
    assert model.kept.untyped_storage().nbytes() == 0
