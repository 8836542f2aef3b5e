"""Losses over the whole batch: Task.features of each row, Task.batch_loss of all rows together.

Each device computes the features of its rows. Features of all devices are gathered and put in the
samples' order, without the rows that only fill up a shape. Every device computes the loss of the
whole batch and its gradient by every row, then goes backward with the gradients of its own rows.
With reducer `collective` all this is a part of the step's program: with one accumulation step the
first pass is kept for backward; with several it is computed again. With reducer `tree` each
microbatch has programs of its own (BatchLossPrograms), and it is always computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped
from jax.typing import ArrayLike

from samecurve.core.determinism.microbatches import accumulation_steps, count_microbatches
from samecurve.core.determinism.step_arithmetic import loss_factor
from samecurve.core.protocols import Task
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, PyTree
from samecurve.jax_engine.model import is_differentiable
from samecurve.jax_engine.sample_numbers import with_numbers
from samecurve.jax_engine.sharded_calls import joined, over_devices, parts_of
from samecurve.jax_engine.staging import StagedMicroBatch
from samecurve.jax_engine.step_program import (
    OUTSIDE,
    GradientSums,
    Merge,
    Rows,
    Setup,
    StepInputs,
    first_of,
    progress_of,
    split_trained,
    totals_of,
    without_fillers,
)
from samecurve.jax_engine.strategies import AXIS

Features = tuple[Arrays, Arrays]  # features that may have a gradient, and others; a row a sample


def microbatch_features(
    task: Task, merge: Merge, params: Arrays, rows: Rows, *, when: ArrayLike
) -> Features:
    """The features of a microbatch. UserError: a feature has not one row a sample."""

    def features(arrays: Arrays) -> Arrays:
        count = len(next(iter(arrays.values())))
        by_name = task.features(merge(params), arrays, progress_of(when))
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
    floats = {name: feature for name, feature in all_features.items() if is_differentiable(feature)}
    return floats, {name: array for name, array in all_features.items() if name not in floats}


def features_program(setup: Setup, merge: Merge) -> Wrapped:
    """Compile (parameters, rows, when) -> a microbatch's features."""
    return setup.compiled(
        lambda params, rows, when: microbatch_features(setup.task, merge, params, rows, when=when)
    )


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
    setup: Setup, whole: Features, scale: jax.Array, when: ArrayLike
) -> tuple[Arrays, jax.Array]:
    """The gradient of the batch's loss sum, scaled, by row; and the totals."""
    floats, others = whole
    factor = loss_factor(scale, setup.plan.nominal_weight)

    def loss(floats: Arrays) -> tuple[jax.Array, jax.Array]:
        totals = loss_totals(setup, {**floats, **others}, when, setup.means)
        return totals[0], totals

    _, pull_back, totals = jax.vjp(loss, floats, has_aux=True)
    (gradients,) = pull_back(factor)
    return gradients, totals


def loss_totals(
    setup: Setup, whole: Arrays, when: ArrayLike, means: Sequence[str] = ()
) -> jax.Array:
    """[loss sum, weight, then sum and weight of each other mean] of a whole batch."""
    numbers = totals_of(setup.task.batch_losses(whole, progress_of(when)), means)
    return jnp.stack([jnp.asarray(number).astype(setup.dtype) for number in numbers])


def rows_gradients(gradients: Arrays, position: jax.Array) -> Arrays:
    """Pick the gradients of the rows at these positions; zeros for rows that are no samples."""
    return {
        name: jnp.take(gradient, position, axis=0, mode="fill", fill_value=0)
        for name, gradient in gradients.items()
    }


def pulled_back(
    setup: Setup, whole: Arrays, rows: Rows, gradients: Arrays, when: ArrayLike
) -> Arrays:
    """The parameters' gradient from that of a microbatch's features, which are computed again."""
    trained, merge = split_trained(setup, whole)
    _, pull_back, _ = jax.vjp(
        lambda trained: microbatch_features(setup.task, merge, trained, rows, when=when),
        trained,
        has_aux=True,
    )
    params_gradient: Arrays
    (params_gradient,) = pull_back(gradients)
    return params_gradient


def accumulate_whole_batch(
    setup: Setup, whole: Arrays, rows: Rows, scale: jax.Array, when: ArrayLike, *, num_samples: int
) -> GradientSums:
    """Over one device's accumulation steps; inside of a shard_map. The first device counts the
    totals of the batch.

    rows: [accumulation steps, microbatch, ...]. num_samples: of the whole step.
    """
    assert rows.position is not None
    trained, merge = split_trained(setup, whole)
    features_of = partial(microbatch_features, setup.task, merge, when=when)
    if rows.real.shape[0] == 1:
        floats, pull_back, others = jax.vjp(
            lambda trained: features_of(trained, first_of(rows)), trained, has_aux=True
        )
        features = jax.tree.map(lambda array: array[None], (floats, others))
    else:
        pull_back = None
        features = lax.map(lambda microbatch: features_of(trained, microbatch), rows)
    of_all = put_together(features, rows.position, num_samples)
    by_row, totals = loss_gradients(setup, of_all, scale, when)
    own = rows_gradients(by_row, rows.position)
    totals = jnp.where(lax.axis_index(AXIS) == 0, totals, 0)
    if pull_back:
        (gradients,) = pull_back({name: array[0] for name, array in own.items()})
        return GradientSums(gradients, totals)

    def add(sums: Arrays, of_round: tuple[Rows, Arrays]) -> tuple[Arrays, None]:
        more = pulled_back(setup, whole, *of_round, when)
        return jax.tree.map(jnp.add, sums, more), None

    gradients, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, trained), (rows, own))
    return GradientSums(gradients, totals)


class Replica(NamedTuple):
    """What one device computes gradients with."""

    params: Arrays  # whole
    scale: jax.Array  # f16's factor of the loss


@dataclass(frozen=True)
class BatchLossPrograms:
    """Every computation is a program for one device, the same for each microbatch; programs over
    all devices only move values.
    """

    setup: Setup

    def gradients_of_each(
        self, replicas: Sequence[Replica], inputs: StepInputs, num_samples: int
    ) -> Iterator[tuple[StagedMicroBatch, GradientSums]]:
        """Gradient sums of this process's microbatches; the step's first also has the totals.

        num_samples: of the whole step
        """
        losses = [
            self._loss_program(features, replica.scale, inputs.when)
            for features, replica in zip(
                self._whole_features(replicas, inputs, num_samples), replicas, strict=True
            )
        ]
        microbatches: list[StagedMicroBatch] = inputs.rows
        for one in microbatches:
            if one.number is not None:
                params, loss = replicas[one.local_device].params, losses[one.local_device]
                yield one, self._pull_program(params, one.rows, *loss, inputs.when)

    def _whole_features(
        self, replicas: Sequence[Replica], inputs: StepInputs, num_samples: int
    ) -> list[Features]:
        """The features of the whole step, on each device of this process."""
        plan = self.setup.plan
        count = count_microbatches(num_samples, plan.batch.micro_batch_size)
        most = accumulation_steps(count, plan.layout.num_devices)
        by_device: list[list[tuple[Features, Any]]] = [[] for _ in replicas]
        for one in inputs.rows:
            params = replicas[one.local_device].params
            features = self._features_program(params, one.rows, inputs.when)
            by_device[one.local_device].append((features, one.rows.position))
        like = next(filter(None, by_device))[0][0]
        nowhere = np.full(plan.batch.micro_batch_size, OUTSIDE, np.int32)
        packed = []
        for device, of_device in zip(self.setup.devices, by_device, strict=True):
            filler = jax.device_put((like, nowhere), device)
            missing = [filler] * (most - len(of_device))
            packed.append(self._pack_program([*of_device, *missing]))
        mesh = self.setup.strategy.mesh
        of_all = joined(packed, PartitionSpec(AXIS), mesh)
        return parts_of(self._exchange_program(num_samples)(*of_all), self.setup.devices)

    @cached_property
    def _features_program(self) -> Wrapped:
        """(parameters, rows, when) -> a microbatch's features."""
        return features_program(self.setup, self.setup.model.merge)

    @cached_property
    def _pack_program(self) -> Wrapped:
        """Pack what is known of one device's microbatches into [1, microbatches, rows, ...]."""
        return self.setup.compiled(
            lambda trees: jax.tree.map(lambda *arrays: jnp.stack(arrays)[None], *trees)
        )

    @cached_property
    def _exchange_program(self) -> Callable[[int], Wrapped]:
        """Compile, for a number of samples: (features, position) by device -> all features."""

        def program(num_samples: int, features: PyTree, position: jax.Array) -> PyTree:
            local = jax.tree.map(lambda array: array[0], features)
            return put_together(local, position[0], num_samples)

        mesh = self.setup.strategy.mesh
        return cache(lambda count: self.setup.compiled(over_devices(partial(program, count), mesh)))

    @cached_property
    def _loss_program(self) -> Wrapped:
        """(features of the whole step, scale, when) -> (gradients by row, totals)."""
        return self.setup.compiled(partial(loss_gradients, self.setup))

    @cached_property
    def _pull_program(self) -> Wrapped:
        """(parameters, rows, gradients by row, totals, when) -> GradientSums of a microbatch."""

        def program(
            whole: Arrays, rows: Rows, gradients: Arrays, totals: jax.Array, when: jax.Array
        ) -> GradientSums:
            assert rows.position is not None
            own = rows_gradients(gradients, rows.position)
            gradient = pulled_back(self.setup, whole, rows, own, when)
            return GradientSums(gradient, jnp.where(rows.position[0] == 0, totals, 0))

        return self.setup.compiled(program)
