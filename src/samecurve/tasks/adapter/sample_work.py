"""The work of a sample of a class that does not tell it: what bench, and a plan's auto, go by.

The loss of two samples, which is computed anyway when a task is described, is counted as it runs
(two_samples.py). In three cases the loss is counted without values instead: rows of unlike length,
weights that are not trained, and models too large to be tried. What is counted follows from the
config, the model and the data alone.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import START
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.two_samples import kept, rows_as_tensors, unfused
from samecurve.torch_engine.model.counted_work import TooManyOperationsError, WorkCounter
from samecurve.torch_engine.model.model_setup import freeze
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial
from samecurve.torch_engine.users_code.side_effects import GeneratorStates
from samecurve.units import counted

if TYPE_CHECKING:  # of torch's own, which few tasks need
    from torch._subclasses.fake_tensor import FakeTensorMode

_RAGGED = 8  # rows of unlike length that stand for all
MOST_OPERATIONS = 20_000  # operations at most of a loss without values: a few seconds
_FORWARD = "3 x those of a forward pass"
_ALL = "those of a forward and a backward pass, since some weights are not trained"


class _UnknownWorkError(Exception):
    """The work of a sample can't be known, and why."""


@dataclass(frozen=True)
class _Work:
    """The work of a pass over the loss of some samples."""

    flops: float  # of a sample, forward and backward
    operations: int
    convolutions: int
    formula: str
    nondeterministic: tuple[str, ...]  # as in Facts


def work_facts(
    adapter: TaskAdapter, config: Config, model: nn.Module, tried: WorkCounter | None
) -> dict[str, Any]:
    """The fields of Facts about the work of a sample, as far as the class does not tell it itself.

    model: the model, perhaps without values, with what is not trained marked so
    tried: the work of two samples with values; None: it could not be computed
    """
    called = {"nondeterministic": tried.nondeterministic.names if tried else ()}
    if "flops_per_sample" in adapter.own_facts:
        return called
    try:
        work = _count(adapter, config, model, tried)
    except _UnknownWorkError as unknown:
        return {**called, "flops_unknown": str(unknown)}
    return {
        "nondeterministic": work.nondeterministic,
        "flops_per_sample": work.flops,
        "operations": work.operations,
        "convolutions": work.convolutions,
        "formulas": {"flops": work.formula},
    }


def _count(
    adapter: TaskAdapter, config: Config, model: nn.Module, tried: WorkCounter | None
) -> _Work:
    if adapter.prepare is not None:
        raise _UnknownWorkError("prepare() makes files that its rows need")
    if adapter.phases:
        raise _UnknownWorkError("a step has several phases")
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if tried is None or is_frozen or adapter.train_data().by_microbatch:
        return _count_without_values(adapter, config, is_frozen=is_frozen)
    _check(tried)
    formula = f"{_FORWARD}, counted by torch in the loss of two samples"
    called = tried.nondeterministic.names
    return _Work(3 * tried.flops / 2, tried.operations, tried.convolutions, formula, called)


def _check(work: WorkCounter) -> None:
    """_UnknownWorkError: not all work was counted, or there is none."""
    if work.unknown:
        raise _UnknownWorkError(f"the loss calls {next(iter(work.unknown))}, a kernel of its own")
    if not work.flops:
        raise _UnknownWorkError("the loss has no product of matrices and no convolution")


def _count_without_values(adapter: TaskAdapter, config: Config, *, is_frozen: bool) -> _Work:
    """Count rows one by one, or two by two where the code refuses a single row."""
    rows = adapter.train_data()
    ids = np.array(rows.alike[:2])
    if rows.by_microbatch:  # spread: data may be sorted by length
        places = np.linspace(0, len(rows.alike) - 1, min(len(rows.alike), _RAGGED))
        ids = rows.alike.start + np.unique(places.astype(np.int64))
    one_by_one = list(ids[:, None]) if rows.by_microbatch else [ids[:1]]
    two_by_two = [ids[place : place + 2] for place in range(0, len(ids) - 1, 2)]
    try:
        passes = _passes(adapter, config, one_by_one, is_frozen=is_frozen)
    except Exception as error:
        if _reads_values(error) or not two_by_two:
            raise _unknown(error) from None
        try:
            passes = _passes(adapter, config, two_by_two, is_frozen=is_frozen)
        except Exception as error:
            raise _unknown(error) from None
    for work, _ in passes:
        _check(work)
    samples = sum(count for _, count in passes)
    called = dict.fromkeys(name for work, _ in passes for name in work.nondeterministic.names)
    factor, formula = (1, _ALL) if is_frozen else (3, _FORWARD)
    return _Work(
        factor * sum(work.flops for work, _ in passes) / samples,
        max(work.operations for work, _ in passes),
        max(work.convolutions for work, _ in passes),
        f"{formula}, counted by torch on tensors without values ({counted(samples, 'sample')})",
        tuple(called),
    )


def _passes(
    adapter: TaskAdapter, config: Config, microbatches: Sequence[Ids], *, is_frozen: bool
) -> list[tuple[WorkCounter, int]]:
    """The work of each of these microbatches, and how many samples it has.

    is_frozen: weights are not trained, so that the backward pass is counted, too
    """
    batches = [rows_as_tensors(adapter, ids) for ids in microbatches]
    passes = []
    with (
        without_values(adapter, config.train.seed) as mode,
        unfused(),
        torch.enable_grad(),
    ):
        model = adapter.model().eval()
        freeze(model, config.optimizer.rules)
        for ids, rows in zip(microbatches, batches, strict=True):
            empty = emptied(mode, rows)
            work = _pass(adapter, model, empty, len(ids), with_backward=is_frozen)
            passes.append((work, len(ids)))
    return passes


@contextmanager
def without_values(adapter: TaskAdapter, seed: int) -> Iterator["FakeTensorMode"]:
    """Tensors that are made in this block have shapes, and no values. Afterwards the task and all
    generators are as before.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    states = GeneratorStates(torch.device("cpu"))
    try:
        with (
            kept(adapter, seed),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of values that go nowhere
            yield mode
    finally:
        states.put_back()


def emptied(mode: "FakeTensorMode", rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows without values."""
    return {name: mode.from_tensor(tensor) for name, tensor in rows.items()}


def total_of(adapter: TaskAdapter, returned: Any) -> torch.Tensor:
    """A number from which a backward pass goes through all that loss() or features() returned."""
    if adapter.whole_batch:
        parts = [feature.sum() for feature in returned.values() if feature.requires_grad]
        return torch.stack(parts).sum()
    total: torch.Tensor = (returned["loss"] if isinstance(returned, Mapping) else returned).sum
    return total


def _pass(
    adapter: TaskAdapter,
    model: nn.Module,
    rows: Mapping[str, torch.Tensor],
    count: int,
    *,
    with_backward: bool,
) -> WorkCounter:
    """The work of one microbatch, perhaps of its backward pass too."""
    method = "features" if adapter.whole_batch else "loss"
    compute, work = getattr(adapter.task, method), WorkCounter(MOST_OPERATIONS)
    with keyed_trial(count), work:
        returned = compute(model, rows, **adapter.arguments_of(method, START))
        if with_backward:
            forward = work.operations, work.convolutions
            total_of(adapter, returned).backward()  # type: ignore[no-untyped-call]
            work.operations, work.convolutions = forward
    return work


def _reads_values(error: Exception) -> bool:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    kinds = (DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, kinds) or "not supported for tensor subclasses" in str(error)


def _unknown(error: Exception) -> _UnknownWorkError:
    if isinstance(error, TooManyOperationsError):
        return _UnknownWorkError(f"the loss has {error}")
    if _reads_values(error):
        return _UnknownWorkError("the loss reads values")
    first_line = str(error).strip().partition("\n")[0]
    return _UnknownWorkError(
        f"without values the loss ends with {type(error).__name__}: {first_line:.80}"
    )
