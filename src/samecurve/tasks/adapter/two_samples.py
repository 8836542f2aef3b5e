"""The loss of two samples on a CPU, computed when a task is described, before anything is trained.

It shows whether the loss returns what it has to, and the commonest mistake: a mean in place of a
sum, or a weight that doesn't count, which is wrong on any number of devices, one included. `plan`
refuses these two. Everything else is tried by the split check as a run starts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from samecurve.core.determinism import RETURN_MEAN
from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import START
from samecurve.errors import UserError
from samecurve.features.guard.additivity import Trial, compare_parts
from samecurve.features.whole_batch.gathered_features import Features, check_rows
from samecurve.tasks.adapter import TaskAdapter
from samecurve.torch_engine.model.counted_work import WorkCounter
from samecurve.torch_engine.precision import as_weights
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial
from samecurve.torch_engine.users_code.side_effects import attributes_kept

# parameters at most, of a model that is tried on two samples: a second or so
_TRIED = 50_000_000
_CLOSE = 1e-3  # more than f32 and another order of adding change


@dataclass(frozen=True)
class Tried:
    """What two samples have shown, once they could be computed."""

    work: WorkCounter  # of both together, in one forward pass
    feature_bytes: int | None = None  # of one sample, where the loss is one of the whole batch


def try_features(adapter: TaskAdapter, params: int, seed: int) -> Tried | None:
    """Compute the features of two samples; None: that is impossible here, which proves nothing.

    params: the model's numbers

    UserError: features() or batch_loss() returns what it must not.
    """
    if not is_tried(adapter, params):
        return None
    task, work = adapter.task, WorkCounter()
    with kept(adapter, seed), unfused():
        try:
            model, rows = adapter.model().eval(), two_rows(adapter)
            with keyed_trial(2), work, torch.enable_grad():
                features: Features = task.features(
                    model, rows, **adapter.arguments_of("features", START)
                )
        except Exception:  # a model for GPUs only, say
            return None
        adapter.check_features(features)
        check_rows(features, 2)
        try:
            loss = task.batch_loss(features, **adapter.arguments_of("batch_loss", START))
            if isinstance(loss, Mapping):
                loss = loss["loss"]
        except Exception:  # of more samples than two, say
            return None
        adapter.check_loss(loss, f"{adapter.name}.batch_loss()")
    return Tried(work, sum(feature.nbytes for feature in features.values()) // 2)


def try_loss(adapter: TaskAdapter, params: int, seed: int) -> Tried | None:
    """Compute the loss of two samples together, and of each alone; None: that is impossible here.

    params: the model's numbers

    UserError: loss() returns what it must not, a mean, or a weight that doesn't count.
    """
    if not is_tried(adapter, params):
        return None
    what, work = f"{adapter.name}.loss()", WorkCounter()
    trials: list[Trial] = []
    with kept(adapter, seed), unfused():
        model, rows = adapter.model().eval(), two_rows(adapter)
        for ids in ([0, 1], [0], [1]):
            batch = {name: tensor[ids] for name, tensor in rows.items()}
            counted = nullcontext() if trials else work
            try:
                # with gradients where it is counted: which operations have a backward pass
                with keyed_trial(len(ids)), counted, torch.set_grad_enabled(not trials):
                    loss = adapter.task.loss(model, batch, **adapter.arguments_of("loss", START))
                if isinstance(loss, Mapping):
                    loss = loss["loss"]
            except Exception:  # a model for GPUs only, say
                return None
            adapter.check_loss(loss, what)
            trials.append(Trial(len(ids), *map(float, loss)))
    whole, *parts = trials
    finding = compare_parts(whole, parts, _CLOSE)
    if finding and finding.kind in {"mean", "unweighted"}:
        raise UserError(f"{what} {finding.text}", RETURN_MEAN, "task")
    return Tried(work)


def is_tried(adapter: TaskAdapter, params: int) -> bool:
    """Whether two samples are computed when the task is described. params: the model's numbers"""
    return params <= _TRIED and can_be_tried(adapter)


def can_be_tried(adapter: TaskAdapter) -> bool:
    """Whether there are two samples of one shape, whose files are there (else prepare() makes
    them).
    """
    return adapter.prepare is None and len(adapter.train_data().alike) >= 2


@contextmanager
def kept(adapter: TaskAdapter, seed: int) -> Iterator[None]:
    """Afterwards the task's attributes and torch's generator are as before."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), attributes_kept(adapter.task):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def unfused() -> Iterator[None]:
    """Let layers run as in training, also without gradients: torch then fuses an encoder's layer
    into one kernel.
    """
    was_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fused)


def two_rows(adapter: TaskAdapter) -> dict[str, torch.Tensor]:
    """The first two rows of one shape."""
    rows = adapter.train_data()
    return rows_as_tensors(adapter, np.array(rows.alike[:2]))


def rows_as_tensors(adapter: TaskAdapter, ids: Ids) -> dict[str, torch.Tensor]:
    """Rows of the training data as a model in f32 gets them."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(as_weights(array, "f32")))
        for name, array in adapter.train_data()[ids].items()
    }
