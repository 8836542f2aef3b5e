"""What a forward pass changes of a model and a task is seen, and put back."""

import itertools
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samecurve.torch_engine.users_code import equal
from samecurve.torch_engine.users_code.holders import holders
from samecurve.torch_engine.users_code.side_effects import (
    TURNS,
    Attributes,
    Buffers,
    Counter,
    GeneratorStates,
    Position,
    counters_in,
)

BANK: dict[str, float] = {}
PLACE = ContextVar("PLACE", default=0)


@cache
def squared(number: int) -> int:
    return number**2


def counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def gathered(last: list[int] = []) -> int:  # noqa: B006 - as users write it
    last.append(1)
    gathered.total = len(last)  # type: ignore[attr-defined]
    return len(last)


class Keeper:
    """Keeps something in each place that is no attribute of its own."""

    seen = 0
    teacher: torch.Tensor | None = None

    def __init__(self) -> None:
        self.count = counting()
        self.turns = cycle([1, 2, 3])
        self.ids = itertools.count(3)

    def loss(self) -> tuple[int, ...]:
        Keeper.seen += 1
        if Keeper.teacher is None:
            Keeper.teacher = torch.ones(2)
        BANK["a"] = BANK.get("a", 0.0) + 1
        PLACE.set(PLACE.get() + 1)
        sys.kept_by_a_test = 1  # type: ignore[attr-defined]
        return (next(self.ids), self.count(), gathered(), squared(7), PLACE.get(), Keeper.seen)


KEPT = {
    "cached function test_side_effects.squared",
    "class variable Keeper.seen",
    "class variable Keeper.teacher",
    "closure variable counting.count.calls",
    "context variable.PLACE",
    "default argument gathered.last",
    "function attribute gathered.total",
    "global variable sys.kept_by_a_test",
    "global variable test_side_effects.BANK",
    "task.ids",
}


class Inner:
    def __init__(self) -> None:
        self.calls = 0


class Task:
    """Counts, in each way that is looked at."""

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


COUNTERS = ("inner.calls", "last", "new", "number", "seen", "stats.calls", "tensor")


def test_attributes_that_change_are_named_and_put_back() -> None:
    task = Task()
    attributes = Attributes(nn.Linear(2, 2), task)
    seen, tensor = task.seen, task.tensor
    task.loss()
    names = {f"task.{name}" for name in (*COUNTERS, "array")} | {"class variable Task.shared"}
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
    names = ("class variable Task.shared", *(f"task.{name}" for name in COUNTERS))
    assert tuple(sorted(counters)) == names
    attributes.put_back()
    attributes.advance(counters)
    assert (task.number, task.inner.calls, task.stats, task.new) == (
        1002,
        1002,
        {"calls": 1002},
        1002,
    )
    assert (len(task.seen), len(task.last), float(task.tensor)) == (1002, 1002, 1002)


def test_variables_of_the_users_code_are_named_and_put_back() -> None:
    """A second pass after put_back() returns what the first has returned."""
    task = Keeper()
    attributes = Attributes(nn.Linear(2, 2), task)
    first = task.loss()
    changed = attributes.changed()
    # a dict is named, and what is in it
    assert changed.keys() - {"global variable test_side_effects.BANK.a"} == KEPT
    assert task.loss() != first
    attributes.put_back()
    assert attributes.changed() == {}
    assert (Keeper.seen, Keeper.teacher, BANK, squared.cache_info().currsize) == (0, None, {}, 0)
    assert not hasattr(sys, "kept_by_a_test")
    assert not hasattr(gathered, "total")
    assert task.loss() == first
    attributes.put_back()


def test_a_variable_gets_another_value() -> None:
    task = Keeper()
    attributes = Attributes(nn.Linear(2, 2), task)
    attributes.set("closure variable counting.count.calls", 4)
    attributes.set("default argument gathered.last", [1, 1])
    assert task.loss()[1:3] == (5, 3)
    attributes.put_back()


def test_an_iterator_is_seen_to_move() -> None:
    task = Keeper()
    for _ in range(5):  # beyond the end of its first turn
        attributes = Attributes(nn.Linear(2, 2), task)
        next(task.turns)
        assert isinstance(attributes.changed()["task.turns"], Position)


def test_a_counter_becomes_a_multiple_of_all_small_numbers() -> None:
    task = Keeper()
    attributes = Attributes(nn.Linear(2, 2), task)
    task.loss()
    assert "class variable Keeper.seen" in attributes.changed()
    counters = {"class variable Keeper.seen": Counter(2, 1000.0)}
    values = []
    for turn in range(TURNS):
        attributes.advance(counters, turn)
        values.append(Keeper.seen)
    attributes.put_back()
    assert values == [1002, 720719, 720720]
    assert next(task.ids) == 3
    assert all(values[2] % number == 0 for number in range(1, 17))


def test_the_walk_of_a_task_without_variables_is_short() -> None:
    """Milliseconds: the holders are those of the model and the task."""
    task = Inner()
    paths = [path for path in holders(nn.Sequential(nn.Linear(2, 2)), task) if " " not in path]
    assert paths == ["model", "0", "task"]


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


def test_a_buffer_that_a_pass_registers_is_taken_out() -> None:
    model = nn.Linear(2, 2)
    buffers = Buffers(model)
    model.register_buffer("mask", torch.ones(2))
    assert list(buffers.changed()) == ["mask"]
    buffers.put_back()
    assert not hasattr(model, "mask")


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
