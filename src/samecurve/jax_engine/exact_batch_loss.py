"""train.exact with a loss over the whole batch, under jax.

As in exact.py every computation is a program for one device, the same for each microbatch; programs
that span devices only move values. First the features of all microbatches are put together on every
device. Then come the loss and its gradient by row. Last, each microbatch runs again, and backward
with its rows' gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from samecurve.core.determinism.microbatches import accumulation_steps, count_microbatches
from samecurve.core.determinism.step_arithmetic import loss_factor
from samecurve.jax_engine.array_types import Arrays, HostArray, PyTree
from samecurve.jax_engine.batch_loss import (
    Features,
    HostRows,
    loss_gradients,
    microbatch_features,
    pulled_back,
    put_together,
    rows_gradients,
)
from samecurve.jax_engine.checkpoint import State, all_params, averaged_params
from samecurve.jax_engine.runtime import exact_jit
from samecurve.jax_engine.sample_numbers import with_trial_keys
from samecurve.jax_engine.sharded_calls import over_devices
from samecurve.jax_engine.step_program import (
    OUTSIDE,
    GradientSums,
    LossSums,
    Merge,
    Rows,
    Setup,
    split_trained,
)

ShapeSpecs = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class StagedMicroBatch:
    """A microbatch on its device, filled up to plan.batch.micro_batch_size rows."""

    local_device: int
    rows: Rows
    number: int  # which microbatch of the step


@dataclass(frozen=True, kw_only=True)
class ExactBatchLoss:
    """The gradients and features of a loss over the whole batch.

    by_device: the sharding of an array that has one row on each device
    example: one row of the data, in the types of the devices' arrays
    names: the means beside the loss
    """

    setup: Setup
    by_device: NamedSharding
    local_devices: Sequence[jax.Device]
    example: Mapping[str, HostArray]
    names: Sequence[str]

    def gradient_sums(
        self,
        states: Sequence[State],
        microbatches: Sequence[StagedMicroBatch],
        num_samples: int,
        when: HostArray,
    ) -> list[GradientSums]:
        """Gradient sums of this process's microbatches; the step's first also has the totals.

        states: one for each device of this process
        num_samples: of the whole step
        """
        whole = self._whole(states, microbatches, num_samples, when)
        losses = [
            self._loss_program(features, state["scale"], when)
            for features, state in zip(whole, states, strict=True)
        ]
        return [
            self._pull_program(
                all_params(states[one.local_device]), one.rows, *losses[one.local_device], when
            )
            for one in microbatches
        ]

    def features(self, state: State, rows: Rows, when: HostArray) -> HostRows:
        """Features of one microbatch of an evaluation."""
        inexact, others = self._eval_features_program(averaged_params(state), rows, when)
        position = np.asarray(rows.position)
        real = position != OUTSIDE
        features = {name: np.asarray(array)[real] for name, array in {**inexact, **others}.items()}
        return HostRows(features, position[real])

    @cached_property
    def feature_shapes(self) -> ShapeSpecs:
        """Shapes of a microbatch's features, for a device that has no microbatch."""
        inexact, others = self._shapes
        return {**inexact, **others}

    @cached_property
    def _shapes(self) -> tuple[ShapeSpecs, ShapeSpecs]:
        size = self.setup.plan.batch.micro_batch_size
        arrays: Any = {
            name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype)
            for name, array in with_trial_keys(self.example, 1).items()
        }
        real: Any = jax.ShapeDtypeStruct((size,), np.bool_)
        rows = Rows(arrays, real)
        params = self.setup.model.held_shapes(self.setup.dtype)
        when = jax.ShapeDtypeStruct((2,), np.int32)
        shapes: tuple[ShapeSpecs, ShapeSpecs] = jax.eval_shape(
            self._features_program, params, rows, when
        )
        return shapes

    @cached_property
    def _zeros(self) -> PyTree:
        return jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self._shapes)

    def _whole(
        self,
        states: Sequence[State],
        microbatches: Sequence[StagedMicroBatch],
        num_samples: int,
        when: HostArray,
    ) -> list[Features]:
        """The features of the whole step, on each device of this process."""
        by_device: list[list[Features]] = [[] for _ in states]
        plan = self.setup.plan
        count = count_microbatches(num_samples, plan.batch.micro_batch_size)
        most = accumulation_steps(count, plan.layout.num_devices)
        shape = (len(states), most, plan.batch.micro_batch_size)
        position = np.full(shape, OUTSIDE, np.int32)
        for one in microbatches:
            of_device = by_device[one.local_device]
            position[one.local_device, len(of_device)] = np.asarray(one.rows.position)
            params = all_params(states[one.local_device])
            of_device.append(self._features_program(params, one.rows, when))
        packed = []
        for device, of_device in zip(self.local_devices, by_device, strict=True):
            fillers = [jax.device_put(self._zeros, device)] * (most - len(of_device))
            packed.append(self._pack_program(of_device + fillers))
        places = [
            jax.device_put(rows[None], device)
            for rows, device in zip(position, self.local_devices, strict=True)
        ]
        features = jax.tree.map(self._over_devices, *packed)
        whole = self._exchange_program(num_samples)(features, self._over_devices(*places))
        return per_device(whole, self.local_devices)

    def _over_devices(self, *rows: jax.Array) -> jax.Array:
        """Make an array over all devices from this process's rows of it."""
        shape = (self.setup.plan.layout.num_devices, *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.by_device, list(rows))

    @cached_property
    def _features_program(self) -> Wrapped:
        """(parameters, rows, when) -> a microbatch's features."""
        return self._make_features_program(self.setup.model.merge)

    @cached_property
    def _eval_features_program(self) -> Wrapped:
        """The same of an evaluation."""
        return self._make_features_program(self.setup.model.merge_for_eval)

    def _make_features_program(self, merge: Merge) -> Wrapped:
        task = self.setup.task
        return exact_jit(
            lambda params, rows, when: microbatch_features(task, merge, params, rows, when=when)
        )

    @cached_property
    def _pack_program(self) -> Wrapped:
        """Pack the features of one device's microbatches into [1, microbatches, rows, ...]."""
        return exact_jit(
            lambda features: jax.tree.map(lambda *arrays: jnp.stack(arrays)[None], *features)
        )

    @cached_property
    def _exchange_program(self) -> Callable[[int], Wrapped]:
        """Compile, for a number of samples: (features, position) by device -> all features."""

        def program(num_samples: int, features: PyTree, position: jax.Array) -> PyTree:
            local = jax.tree.map(lambda array: array[0], features)
            return put_together(local, position[0], num_samples)

        mesh = self.by_device.mesh
        return cache(lambda count: exact_jit(over_devices(partial(program, count), mesh)))

    @cached_property
    def _loss_program(self) -> Wrapped:
        """(whole features, scale, when) -> (gradients by row, totals)."""

        def program(whole: Features, scale: jax.Array, when: jax.Array) -> tuple[Arrays, jax.Array]:
            sums_of = LossSums(self.setup.task, self.names, when)
            factor = loss_factor(scale, self.setup.plan.nominal_weight)
            return loss_gradients(sums_of, whole, factor)

        return exact_jit(program)

    @cached_property
    def _pull_program(self) -> Wrapped:
        """(parameters, rows, gradients by row, totals, when) -> GradientSums of a microbatch."""

        def program(
            whole: Arrays, rows: Rows, gradients: Arrays, totals: jax.Array, when: jax.Array
        ) -> GradientSums:
            assert rows.position is not None
            params, merge = split_trained(self.setup, whole)
            own = rows_gradients(gradients, rows.position)
            gradient = pulled_back(self.setup.task, merge, params, rows, own, when=when)
            return GradientSums(gradient, jnp.where(rows.position[0] == 0, totals, 0))

        return exact_jit(program)


def per_device(tree: PyTree, devices: Sequence[jax.Device]) -> list[PyTree]:
    """Split a replicated tree into one tree for each of these devices."""
    leaves, structure = jax.tree.flatten(tree)
    by_device = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [shards[device] for shards in by_device])
        for device in devices
    ]
