"""What keyed functions, keyed layers and synchronised layers know of the microbatch in work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.errors import UserError
from samecurve.torch_engine.model.compile_marks import constant
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.torch_engine.randomness.generators import seed_host, seed_torch
from samecurve.torch_engine.randomness.keyed_numbers import KeyedNumbers, Tables

_FORWARD = -1  # no graph task: not in backward


@dataclass(eq=False)  # not frozen: one is made for every microbatch of every model
class StagedKeys:
    """values: those of `rows`, pinned where they go to a GPU; None: to be computed when they are
    asked for.
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
    """How far a forward pass is with its draws; it travels with a generator's state, which
    checkpoints keep of where they begin.
    """

    number: int
    calls: dict[str, int]
    task: int  # the graph task that these are of
    is_current: bool  # whether it was running when the mark was made


class MicroBatchContext:
    """The microbatch in work on one device: begin() before each forward pass, the next one only
    after backward. within() also lets random functions serve it, on this thread and in its
    backward pass.

    device: None: where the keys lie.
    """

    def __init__(self, device: torch.device | None = None, sites: DrawSites | None = None) -> None:
        self.device, self.sites = device, sites or DrawSites()
        self.real = True  # False: a dummy, its results dropped
        self.tables = Tables()
        self.packed_order: torch.Tensor | None = None  # of the sequences that a layer is given
        self._draws = 0  # of the microbatch before
        self._number = 0
        self.begin(None)

    def begin(self, keys: StagedKeys | torch.Tensor | None, *, real: bool = True) -> None:
        """keys: of core/determinism/sample_keys.py; as a tensor: int64 [rows]; None: nothing is
        keyed.
        """
        self.staged = keys if isinstance(keys, StagedKeys) else None
        self._keys = keys if isinstance(keys, torch.Tensor) else None
        self.real = real
        self._calls: dict[str, int] = {}
        self._draws = max(self._number, self._draws)
        self._number, self._task = 0, _FORWARD
        self._numbers: KeyedNumbers | None = None
        self._named_numbers: KeyedNumbers | None = None
        self._step_numbers: KeyedNumbers | None = None

    def within(
        self, keys: StagedKeys | None, *, real: bool = True, number: int = 0
    ) -> "MicroBatchContext":
        """Around forward and backward of a microbatch, the step's `number`-th: in a with
        statement.
        """
        self.begin(keys, real=real)
        if keys and self.device and self.sites.reseeds_torch:
            seed_torch(keys.rows, number, self.device)
        if keys and self.sites.reseeds_host:
            seed_host(keys.rows)
        return self

    def __enter__(self) -> None:  # no generator: every microbatch of every model passes here
        _WORK.context = self
        if self.device and self.device.type == "cuda":
            _BY_GPU[self._gpu()] = self

    def __exit__(self, *_error: object) -> None:
        _WORK.context = None
        if self.device and self.device.type == "cuda":
            _BY_GPU.pop(self._gpu(), None)

    def _gpu(self) -> int:
        index = self.device.index if self.device else None
        return torch.cuda.current_device() if index is None else index

    @property
    def keys(self) -> torch.Tensor | None:
        """int64 [rows] on the device."""
        if self._keys is None and self.staged is not None and self.device is not None:
            self.sites.any_drawn = True
            self._keys = self.staged.on(self.device)
        return self._keys

    @property
    def rows(self) -> int | None:
        """None: nothing is keyed."""
        if self.staged is not None:
            return len(self.staged.rows)
        return None if self._keys is None else len(self._keys)

    @property
    def numbers(self) -> KeyedNumbers:
        """Those of the rows."""
        if self._numbers is None:
            keys = self.keys
            assert keys is not None
            self._numbers = KeyedNumbers(keys, self.tables, draws=self._draws)
        return self._numbers

    @property
    def named_numbers(self) -> KeyedNumbers:
        """Those that samecurve.rng() gives."""
        if self._named_numbers is None:
            keys = self.keys
            assert keys is not None
            self._named_numbers = KeyedNumbers(keys, self.tables, "samecurve.rng")
        return self._named_numbers

    @property
    def step_numbers(self) -> KeyedNumbers:
        """Those of the whole step: one row."""
        if self._step_numbers is None:
            key = self.staged.rows.step_key if self.staged else 0
            keys = torch.full((1,), key, dtype=torch.int64, device=self.device)
            self._step_numbers = KeyedNumbers(keys, self.tables)
        return self._step_numbers

    def call_number(self, name: str) -> int:
        """Which call of `name` in this forward pass this is, from 0.

        UserError: computed again in backward, and nobody can say which of several calls that is.
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
        """Which draw of this forward pass this is, from 0.

        UserError: in backward, and nobody can say which draw of the forward pass that is.
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
        """How far the draws are, for resume_at()."""
        return DrawMark(self._number, dict(self._calls), self._task, self._task == graph_task())

    def resume_at(self, mark: DrawMark) -> None:
        """Go on as it was then: at the begin of what a checkpoint computes again, and after it."""
        self._number, self._calls = mark.number, dict(mark.calls)
        self._task = graph_task() if mark.is_current else mark.task


class _Work(threading.local):
    context: MicroBatchContext | None = None
    is_outside = False  # what runs is of no microbatch, whatever the GPU's is


# Of the process, as what they serve is: functions of torch itself, in whatever thread they are
# called. Backward on a GPU runs in autograd's own thread, which finds its microbatch by the GPU.
_WORK = _Work()
_BY_GPU: dict[int, MicroBatchContext] = {}


def context_in_work() -> MicroBatchContext | None:
    """The microbatch that this thread computes, forward or backward."""
    context = _WORK.context
    if context is None and not _WORK.is_outside and _BY_GPU and recomputing():
        return _BY_GPU.get(torch.cuda.current_device())
    return context


@contextmanager
def outside_of_microbatches() -> Iterator[None]:
    """Within a microbatch's within(), something that is not of that microbatch alone."""
    held = _WORK.context, _WORK.is_outside
    _WORK.context, _WORK.is_outside = None, True
    try:
        yield
    finally:
        _WORK.context, _WORK.is_outside = held


@constant
def recomputing() -> bool:
    """Whether this is a forward pass inside of a backward pass: activation checkpointing computes a
    block again.
    """
    return graph_task() != _FORWARD


def graph_task() -> int:
    """Which backward pass runs in this thread; _FORWARD: none."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public word for it
