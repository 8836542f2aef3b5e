"""Losses over the whole batch: Task.features of each row, Task.batch_loss of all rows together.

Each device computes the features of its rows. Features of all devices are gathered and put in the
samples' order, without the rows that only fill up a shape. Every device computes the loss of the
whole batch and its gradient by every row, then goes backward with the gradients of its own rows.
With one accumulation step the first pass is kept for backward; with several it is computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped

from samecurve.core.determinism.mean import Mean
from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.protocols import Progress, Task
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, HostArray
from samecurve.jax_engine.runtime import exact_jit
from samecurve.jax_engine.sample_numbers import with_numbers
from samecurve.jax_engine.step_program import (
    OUTSIDE,
    GradientSums,
    LossSums,
    Merge,
    Rows,
    Setup,
    first_of,
    round_program,
    without_fillers,
)
from samecurve.jax_engine.strategies import AXIS

Features = tuple[Arrays, Arrays]  # features that may have a gradient, and others; a row a sample


def positions_of(number: int, count: int, micro_batch_size: int) -> HostArray:
    """The positions of a microbatch's rows in the step. number: which microbatch of the step."""
    return number * micro_batch_size + np.arange(count, dtype=np.int32)


def microbatch_features(
    task: Task, merge: Merge, params: Arrays, rows: Rows, *, when: jax.Array
) -> Features:
    """The features of a microbatch. UserError: a feature has not one row a sample."""

    def features(arrays: Arrays) -> Arrays:
        count = len(next(iter(arrays.values())))
        by_name = task.features(merge(params), arrays, Progress(*when))
        for name, feature in by_name.items():
            if jnp.shape(feature)[0] != count:
                raise UserError(
                    f'features() gives "{name}" of shape {jnp.shape(feature)} for {count} samples',
                    "one row a sample, in the samples' order",
                    "task",
                )
        return {name: jnp.asarray(feature) for name, feature in sorted(by_name.items())}

    def of_one_row(row: Arrays) -> Arrays:
        of_one = with_numbers(features, {name: array[None] for name, array in row.items()})
        return {name: feature[0] for name, feature in of_one.items()}

    leave_out: Callable[[Arrays, jax.Array], Arrays] | None = getattr(task, "leave_out", None)
    if leave_out:
        all_features = with_numbers(features, without_fillers(leave_out, rows))
    else:
        all_features = jax.vmap(of_one_row)(rows.arrays)
    inexact = {
        name: feature
        for name, feature in all_features.items()
        if jnp.issubdtype(feature.dtype, jnp.inexact)
    }
    return inexact, {name: array for name, array in all_features.items() if name not in inexact}


def put_together(features: Any, position: jax.Array, num_samples: int) -> Any:
    """Put the rows of all devices in the samples' order, on every device; inside a shard_map.

    features: a tree of [accumulation steps, microbatch, ...]
    position: [accumulation steps, microbatch], places in the step; OUTSIDE: not a sample
    """
    places = lax.all_gather(position, AXIS).reshape(-1)

    def whole(rows: jax.Array) -> jax.Array:
        gathered = lax.all_gather(rows, AXIS)
        flat = gathered.reshape(-1, *rows.shape[2:])
        empty = jnp.zeros((num_samples, *rows.shape[2:]), rows.dtype)
        return empty.at[places].set(flat, mode="drop")

    return jax.tree.map(whole, features)


def loss_gradients(
    sums_of: LossSums, whole: Features, factor: jax.Array
) -> tuple[Arrays, jax.Array]:
    """The gradient of factor times the batch's loss sum, by row; and the totals."""
    inexact, others = whole

    def loss(inexact: Arrays) -> tuple[jax.Array, jax.Array]:
        totals = loss_totals(sums_of, {**inexact, **others}, factor.dtype)
        return totals[0], totals

    _, pull_back, totals = jax.vjp(loss, inexact, has_aux=True)
    (gradients,) = pull_back(factor)
    return gradients, totals


def loss_totals(sums_of: LossSums, whole: Arrays, dtype: Any) -> jax.Array:
    """[loss sum, weight, then sum and weight of each other mean] of a whole batch."""
    losses = sums_of.task.batch_losses(whole, Progress(*sums_of.when))
    numbers = [number for name in ("loss", *sums_of.names) for number in losses[name]]
    return jnp.stack([jnp.asarray(number).astype(dtype) for number in numbers])


def rows_gradients(gradients: Arrays, position: jax.Array) -> Arrays:
    """Pick the gradients of the rows at these positions; zeros for rows that are no samples."""
    return {
        name: jnp.take(gradient, position, axis=0, mode="fill", fill_value=0)
        for name, gradient in gradients.items()
    }


def pulled_back(
    task: Task, merge: Merge, params: Arrays, rows: Rows, gradients: Arrays, *, when: jax.Array
) -> Arrays:
    """The parameters' gradient from that of a microbatch's features, which are computed again."""
    _, pull_back, _ = jax.vjp(
        lambda params: microbatch_features(task, merge, params, rows, when=when),
        params,
        has_aux=True,
    )
    params_gradient: Arrays
    (params_gradient,) = pull_back(gradients)
    return params_gradient


def accumulate_whole_batch(
    sums_of: LossSums,
    merge: Merge,
    params: Arrays,
    rows: Rows,
    factor: jax.Array,
    *,
    num_samples: int,
) -> GradientSums:
    """Over one device's accumulation steps; inside of a shard_map. The first device counts the
    loss.

    rows: [accumulation steps, microbatch, ...]. factor: of the loss sum.
    """
    assert rows.position is not None
    task, when = sums_of.task, sums_of.when
    if rows.real.shape[0] == 1:
        inexact, pull_back, others = jax.vjp(
            lambda params: microbatch_features(task, merge, params, first_of(rows), when=when),
            params,
            has_aux=True,
        )
        features = jax.tree.map(lambda array: array[None], (inexact, others))
    else:
        pull_back = None
        features = lax.map(
            lambda microbatch: microbatch_features(task, merge, params, microbatch, when=when), rows
        )
    whole = put_together(features, rows.position, num_samples)
    by_row, totals = loss_gradients(sums_of, whole, factor)
    own = rows_gradients(by_row, rows.position)
    totals = jnp.where(lax.axis_index(AXIS) == 0, totals, 0)
    if pull_back:
        (gradients,) = pull_back({name: array[0] for name, array in own.items()})
        return GradientSums(gradients, totals)

    def add(sums: Arrays, of_round: tuple[Rows, Arrays]) -> tuple[Arrays, None]:
        microbatch, gradients = of_round
        more = pulled_back(task, merge, params, microbatch, gradients, when=when)
        return jax.tree.map(jnp.add, sums, more), None

    gradients, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), (rows, own))
    return GradientSums(gradients, totals)


class RoundFeatures(NamedTuple):
    """Features of one round of an evaluation, gathered from all devices onto every device."""

    features: Arrays  # [devices, microbatch, ...]
    position: jax.Array  # [devices, microbatch], among the held-out samples


class HostRows(NamedTuple):
    """Features of some held-out samples, on the host."""

    features: Mapping[str, HostArray]
    position: HostArray


def make_round_features(setup: Setup) -> Wrapped:
    """Compile the features of an evaluation's round: round_program() -> RoundFeatures."""

    def features(params: Arrays, rows: Rows, when: jax.Array) -> Any:
        inexact, others = microbatch_features(
            setup.task, setup.model.merge_for_eval, params, rows, when=when
        )
        assert rows.position is not None
        local = RoundFeatures({**inexact, **others}, rows.position)
        return jax.tree.map(lambda array: lax.all_gather(array, AXIS), local)

    return round_program(setup, features)


def feature_shapes(features: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of features [devices, microbatch, ...], without the axis of devices."""
    return {
        name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in features.items()
    }


def on_host(one: RoundFeatures) -> HostRows:
    """Fetch the features of a round, without the rows that are no samples."""
    position = np.asarray(one.position.addressable_data(0)).reshape(-1)
    real = position != OUTSIDE
    features = {}
    for name, array in one.features.items():
        rows = np.asarray(array.addressable_data(0))
        features[name] = rows.reshape(-1, *rows.shape[2:])[real]
    return HostRows(features, position[real])


class EvalLosses:
    """The summed losses of the global batches of held-out samples; the last batch may be short."""

    def __init__(self, setup: Setup) -> None:
        self._plan = setup.plan
        compiled: Callable[..., Wrapped] = exact_jit if setup.plan.compute.exact else jax.jit
        self._totals = compiled(
            lambda whole, when: loss_totals(LossSums(setup.task, (), when), whole, setup.dtype)
        )

    def total(
        self,
        parts: Sequence[HostRows],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        when: HostArray,
        over_processes: Callable[[HostArray], HostArray] = lambda rows: rows,
        *,
        samples: int,
    ) -> Mean:
        """The loss over all held-out samples; every process computes the same.

        parts: the features of this process's samples
        shapes: the shapes of a microbatch's features
        over_processes: adds whole numbers over all processes; one process has each row, the others
            zeros
        samples: the number of held-out samples of all processes
        """
        whole = {}
        for name, spec in shapes.items():
            rows = np.zeros((samples, *spec.shape[1:]), spec.dtype)
            for part in parts:
                rows[part.position] = part.features[name]
            whole[name] = _summed_bytes(rows, over_processes)
        loss = np.zeros(2)
        for begin, end in split_batch(samples, self._plan.batch.global_batch_size):
            batch = {name: rows[begin:end] for name, rows in whole.items()}
            loss += np.asarray(self._totals(batch, when), np.float64)
        return Mean(*loss.tolist())


def _summed_bytes(rows: HostArray, over_processes: Callable[[HostArray], HostArray]) -> HostArray:
    """Gather rows, of which one process each has the values and the others zeros, bit by bit."""
    encoded = rows.tobytes()
    words = np.frombuffer(encoded + bytes(-len(encoded) % 4), np.int32)
    summed = over_processes(words).tobytes()[: len(encoded)]
    return np.frombuffer(summed, rows.dtype).reshape(rows.shape)
