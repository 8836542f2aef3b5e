"""Steps whose gradients are added along the step's tree (reducer `tree`).

The tree (core/determinism/microbatches.py) does not depend on the devices, so a sum has the same
bits on any number of them. XLA compiles a program for one device in another way than a part of a
program for several. So whatever computes is a program for one device, without collectives: the
gradients of a microbatch, and the update. Programs over all devices only move values and add them,
number by number: each device adds up one part of the values, or its own shard (fsdp).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from samecurve.core.determinism.microbatches import (
    Node,
    TreeSum,
    count_microbatches,
    microbatches_of,
    subtrees,
)
from samecurve.jax_engine.array_types import Arrays, PyTree
from samecurve.jax_engine.batch_loss import BatchLossPrograms, Replica
from samecurve.jax_engine.checkpoint import State, all_params
from samecurve.jax_engine.sharded_calls import joined, parts_of, shard_map
from samecurve.jax_engine.staging import StagedMicroBatch
from samecurve.jax_engine.step_program import (
    GradientSums,
    Reduced,
    Rows,
    StepInputs,
    Steps,
    apply_update,
    microbatch_gradients,
)
from samecurve.jax_engine.strategies import AXIS, row_axis
from samecurve.jax_engine.tree_norm import piece_sums, sum_of_pieces

_BY_DEVICE, _WHOLE = PartitionSpec(AXIS), PartitionSpec()
States = list[State]  # a state or its shards, for each device of this process
SubtreeSums = list[list[GradientSums]]  # for each device of this process
# for each device of this process: packed sums, their squared norm, the numbers added up beside them
PackedSums = list[tuple[jax.Array, jax.Array, jax.Array]]


class TreeSteps(Steps[States, SubtreeSums, PackedSums]):
    """A state is a list of states, whose arrays are on one device each."""

    def place(self, state: State) -> States:
        return parts_of(state, self.setup.devices)

    def one_state(self, state: States) -> State:
        joined_state: State = self._joined(state, self.setup.layout.specs)
        return joined_state

    def _joined(self, parts: Sequence[PyTree], specs: PyTree) -> PyTree:
        return joined(parts, specs, self.setup.strategy.mesh)

    # The gradients of microbatches

    def gradient_sums(self, state: States, inputs: StepInputs, num_samples: int) -> SubtreeSums:
        replicas = [
            Replica(params, one["scale"])
            for params, one in zip(self._whole_params(state), state, strict=True)
        ]
        gradients = self._gradients_of_each(replicas, inputs)
        if self.setup.plan.sees_whole_batch:
            gradients = self._batch_loss.gradients_of_each(replicas, inputs, num_samples)
        count = count_microbatches(num_samples, self.setup.plan.batch.micro_batch_size)
        trees = [TreeSum[GradientSums](count, self._add_program) for _ in self.setup.devices]
        for microbatch, sums in gradients:
            assert microbatch.number is not None
            trees[microbatch.local_device].give((0, microbatch.number), sums)
        return [[sums for _, sums in tree.held] for tree in trees]

    def _gradients_of_each(
        self, replicas: Sequence[Replica], inputs: StepInputs
    ) -> Iterator[tuple[StagedMicroBatch, GradientSums]]:
        microbatches: list[StagedMicroBatch] = inputs.rows
        for one in microbatches:
            if one.number is not None:
                params, scale = replicas[one.local_device]
                yield one, self._gradient_program(params, one.rows, scale, inputs.when)

    def _whole_params(self, state: States) -> list[Arrays]:
        shards = [all_params(one) for one in state]
        if self.setup.plan.layout.shards == 1:
            return shards
        return self.setup.whole_params(self._joined(shards, all_params(self.setup.layout.specs)))

    @cached_property
    def _gradient_program(self) -> Wrapped:
        """(parameters, rows, scale, when) -> GradientSums of a microbatch."""
        return self.setup.compiled(partial(microbatch_gradients, self.setup))

    @cached_property
    def _add_program(self) -> Wrapped:
        return self.setup.compiled(
            lambda left, right: jax.tree.map(jnp.add, left, right), donate=(0,)
        )

    @cached_property
    def _batch_loss(self) -> BatchLossPrograms:
        return BatchLossPrograms(self.setup)

    # Sums over all devices

    def reduce(self, sums: SubtreeSums, extra: jax.Array, num_samples: int) -> PackedSums:
        count = count_microbatches(num_samples, self.setup.plan.batch.micro_batch_size)
        most = max(map(len, self._subtrees(count)))
        rows = [
            self._packed(of_device, most, device)
            for of_device, device in zip(sums, self.setup.devices, strict=True)
        ]
        packed = self._joined(rows, _BY_DEVICE)
        packed, squares, extra = self._exchange_program(count)(packed, extra)
        return parts_of((packed, self._norm_program(squares), extra), self.setup.devices)

    @cached_property
    def _subtrees(self) -> Callable[[int], list[list[Node]]]:
        """For a number of microbatches: for each device of the plan the nodes whose sums it has."""
        devices = self.setup.plan.layout.num_devices
        return cache(
            lambda count: [
                subtrees(microbatches_of(count, place, devices), count) for place in range(devices)
            ]
        )

    def _packed(self, sums: list[GradientSums], most: int, device: jax.Device) -> jax.Array:
        """The sums of one device's subtrees, packed: [1, subtrees, devices, values]. They are
        filled up to one number of subtrees on all devices.
        """
        packed: jax.Array
        if sums:
            packed = self._pack_program([*sums, *sums[-1:] * (most - len(sums))])
        else:
            totals = jax.ShapeDtypeStruct((self.setup.num_totals,), self.setup.dtype)
            shapes: Any = (self.setup.model.held_shapes(self.setup.dtype), totals)
            like = jax.eval_shape(self._pack_program, [GradientSums(*shapes)] * most)
            packed = jax.device_put(np.zeros(like.shape, like.dtype), device)
        return packed

    @cached_property
    def _pack_program(self) -> Wrapped:
        strategy, trained = self.setup.strategy, self.setup.layout.trained

        def pack(sums: GradientSums) -> jax.Array:
            return strategy.by_owner([sums.gradients[name] for name in trained], sums.totals)

        return self.setup.compiled(lambda sums: jnp.stack([pack(one) for one in sums])[None])

    @cached_property
    def _exchange_program(self) -> Callable[[int], Wrapped]:
        """Compile, for a number of microbatches, the exchange of subtree sums between devices.

        (packed [devices, subtrees, devices, values], extra [devices, n]) -> the sums along the tree
        that each device goes on with, packed; their squares; the sum of extra, on every device.
        """
        strategy = self.setup.strategy

        def program(count: int, packed: jax.Array, extra: jax.Array) -> tuple[jax.Array, ...]:
            of_all_devices = lax.all_to_all(
                packed[0], AXIS, split_axis=1, concat_axis=0, tiled=False
            )  # [devices, subtrees, values]
            tree: TreeSum[jax.Array] = TreeSum(count, jnp.add)
            for place, nodes in enumerate(self._subtrees(count)):
                for number, node in enumerate(nodes):
                    tree.give(node, of_all_devices[place, number])
            sums = strategy.of_owners(tree.total(), self._num_packed)
            return sums, jnp.square(sums), lax.psum(extra, AXIS)[0]

        def compiled(count: int) -> Wrapped:
            mapped = shard_map(
                partial(program, count),
                mesh=strategy.mesh,
                in_specs=_BY_DEVICE,
                out_specs=(strategy.sums_spec, strategy.sums_spec, _WHOLE),
            )
            return self.setup.compiled(mapped)

        return cache(compiled)

    @cached_property
    def _norm_program(self) -> Wrapped:
        """(squares of packed sums) -> the sum of those of the gradient; it only adds, so its bits
        are the same on any number of devices.
        """
        strategy, specs = self.setup.strategy, self.setup.model.specs
        shapes = {name: specs[name].shape for name in self.setup.layout.trained}
        axes = {name: row_axis(shape) for name, shape in shapes.items() if shape}

        def program(squares: jax.Array) -> jax.Array:
            sums = piece_sums(self._unpacked(squares).gradients, axes)
            return sum_of_pieces(
                strategy.of_all_rows(array, shapes[name]) for name, array in sums.items()
            )

        mapped = shard_map(
            program, mesh=strategy.mesh, in_specs=strategy.sums_spec, out_specs=_WHOLE
        )
        return self.setup.compiled(mapped)

    def _unpacked(self, packed: jax.Array) -> GradientSums:
        gradients, begin = {}, 0
        for name, shape in self._held_shapes.items():
            end = begin + int(np.prod(shape, dtype=np.int64))
            gradients[name] = packed[begin:end].reshape(shape)
            begin = end
        return GradientSums(gradients, packed[begin:])

    @cached_property
    def _held_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what one device holds of the trained parameters."""
        strategy, specs = self.setup.strategy, self.setup.model.specs
        return {name: strategy.shard_shape(specs[name].shape) for name in self.setup.layout.trained}

    @property
    def _num_packed(self) -> int:
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._held_shapes.values()]
        return sum(sizes) + self.setup.num_totals

    # The update

    def update(self, state: States, reduced: PackedSums, lr: Any) -> tuple[States, jax.Array]:
        updated = [
            self._update_program(one, *sums, lr) for one, sums in zip(state, reduced, strict=True)
        ]
        _, metrics = updated[0]  # the same on every device
        return [one for one, _ in updated], metrics

    @cached_property
    def _update_program(self) -> Wrapped:
        """(state, packed sums, squared norm, extra, lr) -> (state, metrics)."""

        def program(
            state: State,
            packed: jax.Array,
            squared_norm: jax.Array,
            extra: jax.Array,
            lr: jax.Array,
        ) -> tuple[State, jax.Array]:
            reduced = Reduced(self._unpacked(packed), squared_norm, extra)
            return apply_update(self.setup, state, reduced, lr)

        return self.setup.compiled(program, donate=(0,))

    def rows_again(
        self, rows: list[StagedMicroBatch], number: int, _index: int
    ) -> tuple[Rows, int]:
        parts = []
        for place, device in enumerate(self.setup.devices):
            own = [one for one in rows if (one.local_device, one.number) == (place, number)]
            on_device = jax.device_put((own or rows)[0].rows, device)
            parts.append(jax.tree.map(lambda array: array[None, None], on_device))
        again: Rows = self._joined(parts, _BY_DEVICE)
        return again, 0
