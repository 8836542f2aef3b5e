"""The microbatch that is being computed on a device: its keys, and how many numbers it has drawn.

Random functions, dropout layers, synchronised BatchNorm layers and samecurve.rng(batch) ask for it.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from samecurve.core.determinism.sample_keys import RowKeys, mix
from samecurve.errors import UserError
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.torch_engine.randomness.keyed_numbers import KeyedNumbers, Tables, constant

_FORWARD = -1  # no graph task: not in backward


@dataclass(eq=False)  # not frozen: one is made for every microbatch of every model
class StagedKeys:
    """The keys of a microbatch's rows.

    values: of `rows`, pinned where they go to a GPU; None: computed when they are asked for
    """

    rows: RowKeys
    values: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        values = self.values
        if values is None:
            values = torch.from_numpy(self.rows.values)
            if device.type == "cuda":
                values = values.pin_memory()
        return values.to(device, non_blocking=True)


class DrawMark(NamedTuple):
    """How many numbers a forward pass has drawn. A mark is kept with the generator's state that an
    activation checkpoint saves where it begins.

    number: of draws; calls: of each named function
    task: the graph task that made these draws
    is_current: whether that graph task was running when the mark was made
    """

    number: int
    calls: dict[str, int]
    task: int
    is_current: bool


class MicroBatchContext:
    """The microbatch that is being computed on one device.

    begin() comes before each forward pass, and the next begin() only after backward. within() also
    lets random functions draw this microbatch's numbers, on this thread and in its backward pass.

    real: False: the microbatch is a dummy, whose results are dropped
    packed_order: the order of the sequences that a recurrent layer is given
    """

    def __init__(self, device: torch.device, sites: DrawSites | None = None) -> None:
        self.device, self.sites = device, sites or DrawSites()
        self.real = True
        self.tables = Tables()
        self.packed_order: torch.Tensor | None = None
        self._draws = 0  # the most in a microbatch so far
        self._number = 0
        self.begin(None)

    def begin(self, keys: StagedKeys | None, *, real: bool = True) -> None:
        """Begin a microbatch. keys: None: nothing is keyed"""
        self.staged, self.real = keys, real
        self._keys: torch.Tensor | None = None
        self._calls: dict[str, int] = {}
        self._draws = max(self._number, self._draws)
        self._number, self._task = 0, _FORWARD
        self._numbers: KeyedNumbers | None = None
        self._named_numbers: KeyedNumbers | None = None
        self._step_numbers: KeyedNumbers | None = None

    def within(
        self, keys: StagedKeys | None, *, real: bool = True, number: int = 0
    ) -> "MicroBatchContext":
        """Begin a microbatch; for a with statement around its forward and backward passes.

        number: of the microbatch in its step
        """
        self.begin(keys, real=real)
        if keys and self.sites.reseeds_torch:
            step_and_number = np.array([keys.rows.step_key + number], np.uint64)
            seed_torch(int(mix(step_and_number)[0] >> np.uint64(1)), self.device)
        if keys and self.sites.reseeds_host:
            seed_host(keys.rows.step_key)
        return self

    def __enter__(self) -> None:  # @contextmanager would be slower, for every microbatch
        _WORK.context = self
        if self.device.type == "cuda":
            _BY_GPU[_gpu_index(self.device)] = self

    def __exit__(self, *_error: object) -> None:
        _WORK.context = None
        if self.device.type == "cuda":
            _BY_GPU.pop(_gpu_index(self.device), None)

    @property
    def keys(self) -> torch.Tensor | None:
        """int64 [rows] on the device."""
        if self._keys is None and self.staged is not None:
            self.sites.any_drawn = True
            self._keys = self.staged.on(self.device)
        return self._keys

    @property
    def rows(self) -> int | None:
        """The count of rows; None: nothing is keyed."""
        return None if self.staged is None else len(self.staged.rows)

    @property
    def numbers(self) -> KeyedNumbers:
        """Numbers that torch's random functions draw for the rows."""
        if self._numbers is None:
            keys = self.keys
            assert keys is not None
            self._numbers = KeyedNumbers(keys, self.tables, draws=self._draws)
        return self._numbers

    @property
    def named_numbers(self) -> KeyedNumbers:
        """Numbers that samecurve.rng() draws for the rows."""
        if self._named_numbers is None:
            keys = self.keys
            assert keys is not None
            self._named_numbers = KeyedNumbers(keys, self.tables, "samecurve.rng")
        return self._named_numbers

    @property
    def step_numbers(self) -> KeyedNumbers:
        """Numbers that belong to the whole step: one row."""
        if self._step_numbers is None:
            key = self.staged.rows.step_key if self.staged else 0
            keys = torch.full((1,), key, dtype=torch.int64, device=self.device)
            self._step_numbers = KeyedNumbers(keys, self.tables)
        return self._step_numbers

    def call_number(self, name: str) -> int:
        """Count the calls of `name` in this forward pass: 0 for the first call.

        UserError: the call is computed again in backward, and could be any of several calls.
        """
        calls = self._calls.get(name, 0)
        if not recomputing() or self._task == graph_task():
            self._calls[name] = calls + 1
            return calls
        if calls != 1:
            raise UserError(
                f"{name} is called {calls} times in a forward pass and computed again in backward,"
                " where its calls can't be told apart",
                "a module of its own for each call; or no activation recompute",
                "model",
            )
        return 0

    def draw_number(self, function: str) -> int:
        """Count the draws in this forward pass: 0 for the first draw.

        UserError: the draw is made in backward, and could be any draw of the forward pass.
        """
        if self._task != graph_task():
            raise UserError(
                f"{function} is called in backward, where it can't be told which of the forward"
                " pass's numbers it is to draw",
                "preserve_rng_state=True (checkpoint's default); numbers drawn in the forward pass,"
                " where backward itself draws",
                "model",
            )
        self._number += 1
        return self._number - 1

    def mark(self) -> DrawMark:
        """A mark of how many numbers are drawn, for resume_at()."""
        return DrawMark(self._number, dict(self._calls), self._task, self._task == graph_task())

    def resume_at(self, mark: DrawMark) -> None:
        """Continue from a mark, where a checkpoint begins to compute a block again and after it."""
        self._number, self._calls = mark.number, dict(mark.calls)
        self._task = graph_task() if mark.is_current else mark.task


class _Work(threading.local):
    context: MicroBatchContext | None = None
    is_outside = False  # this thread computes no microbatch, even if its GPU does


# State of the whole process, since torch's own functions ask for it, in whatever thread they are
# called. Backward on a GPU runs in autograd's own thread, which finds its microbatch by the GPU.
_WORK = _Work()
_BY_GPU: dict[int, MicroBatchContext] = {}


def context_in_work() -> MicroBatchContext | None:
    """The microbatch that this thread is computing, forward or backward; None: none."""
    context = _WORK.context
    if context is None and not _WORK.is_outside and _BY_GPU and recomputing():
        return _BY_GPU.get(torch.cuda.current_device())
    return context


@contextmanager
def outside_of_microbatches() -> Iterator[None]:
    """Inside of a microbatch's within(), compute something that belongs to no single microbatch."""
    held = _WORK.context, _WORK.is_outside
    _WORK.context, _WORK.is_outside = None, True
    try:
        yield
    finally:
        _WORK.context, _WORK.is_outside = held


@constant
def recomputing() -> bool:
    """Whether this is a forward pass inside of a backward pass, in which activation checkpointing
    computes a block again.
    """
    return graph_task() != _FORWARD


def graph_task() -> int:
    """The number of the backward pass that runs in this thread; _FORWARD: none."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public word for it


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the host and of this device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[_gpu_index(device)].manual_seed(seed)


def _gpu_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def seed_host(step_key: int) -> None:
    """Seed numpy's and Python's generators by the run's seed and step: for every microbatch, or
    before batch_loss() and after_step(), which every process computes by itself.
    """
    random.seed(step_key)
    np.random.seed(step_key % 2**32)


_NAME = "samecurve.rng"


class TorchSampleNumbers:
    """Random numbers for the rows of the microbatch that is being computed."""

    def __init__(self, context: MicroBatchContext) -> None:
        self._context = context

    def _next(self) -> tuple[KeyedNumbers, int]:
        self._context.sites.any_drawn = True
        return self._context.named_numbers, self._context.call_number(_NAME)

    def _shaped(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return values.view(len(values), *shape)

    def uniform(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.uniform(draw, [prod(shape)], getattr(torch, dtype)), shape)

    def normal(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.normal(draw, [prod(shape)], getattr(torch, dtype)), shape)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        numbers, draw = self._next()
        return self._shaped(numbers.integers(draw, [prod(shape)], low, high), shape)

    def bernoulli(self, p: float, *shape: int) -> torch.Tensor:
        return self.uniform(*shape) < p


def numbers_in_work() -> TorchSampleNumbers | None:
    context = context_in_work()
    return TorchSampleNumbers(context) if context and context.rows else None
