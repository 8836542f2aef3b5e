"""train.exact under jax's fsdp: the state is cut into shards, and has the bits of one device.

As in exact.py, what computes is a program for one device. Before a step all devices gather whole
weights, so a microbatch's gradients are those of one device. The owner of a shard adds up its part
of all devices' sums along the step's tree, and updates it: each number of an array is updated in
the same way, wherever the array is cut. The norm is taken by rows (exact_norm.py).

Arrays are cut along their longest axis, which does not follow the number of devices.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, subtrees
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import ArrayShard, Task
from samecurve.core.weights import digest
from samecurve.jax_engine.array_types import Arrays, Shape
from samecurve.jax_engine.checkpoint import State
from samecurve.jax_engine.engine import JaxEngine
from samecurve.jax_engine.exact import ExactEngine, ParamsOf, ReplicaStates
from samecurve.jax_engine.exact_batch_loss import per_device
from samecurve.jax_engine.exact_norm import longest_axis, piece_sums, sum_of_pieces
from samecurve.jax_engine.runtime import exact_jit
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.step_program import GradientSums
from samecurve.jax_engine.strategies import AXIS, Sharded

_BY_DEVICE, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


class CutByRows(Sharded):
    """fsdp whose arrays are cut along their longest axis, on any number of devices."""

    def _shard_axis(self, shape: Shape) -> int:
        return longest_axis(shape)

    def shards(self, array: jax.Array) -> jax.Array:
        """The numbers of each device's shard of a whole array, [devices, numbers]."""
        count = self.mesh.size
        if self._is_replicated(array.shape):
            return jnp.broadcast_to(array.reshape(1, -1), (count, array.size))
        axis = longest_axis(array.shape)
        size = array.shape[axis]
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, self._padded_size(size) - size)
        rows = jnp.moveaxis(jnp.pad(array, padding), axis, 0)
        apart = rows.reshape(count, -1, *rows.shape[1:])
        return jnp.moveaxis(apart, 1, axis + 1).reshape(count, -1)

    def shard_shape(self, shape: Shape) -> Shape:
        """The shape of a device's shard of a whole array."""
        if self._is_replicated(shape):
            return shape
        axis = longest_axis(shape)
        each = self._padded_size(shape[axis]) // self.mesh.size
        return (*shape[:axis], each, *shape[axis + 1 :])

    def of_all_rows(self, sums: jax.Array, shape: Shape) -> jax.Array:
        """The sums of a whole array's rows, from those of this device's shard, on every device."""
        if self._is_replicated(shape):
            return sums
        rows = shape[longest_axis(shape)]
        pieces = len(sums) * self.mesh.size // self._padded_size(rows)
        gathered: jax.Array = lax.all_gather(sums, AXIS, tiled=True)
        return gathered[: rows * pieces]


class ShardedExactEngine(ExactEngine):
    """A state is a list of trees of shards, one for each device of this process."""

    _strategy: CutByRows

    def __init__(
        self,
        task: Task,
        plan: Plan,
        optimizer: Optimizer,
        devices: Sequence[jax.Device],
        index: int,
    ) -> None:
        super().__init__(task, plan, optimizer, devices, index)
        self._strategy = CutByRows(self._mesh)

    # Weights, whole on each device while it computes

    def _whole_states(self, states: ReplicaStates, params_of: ParamsOf) -> ReplicaStates:
        shards = [params_of(state) for state in states]
        specs = {name: self._strategy.spec(self._model.shapes[name]) for name in shards[0]}
        whole = per_device(self._gather_program(self._joined(specs, shards)), self._local_devices)
        return [
            State({**state, "params": params, "frozen": {}, "average": {}})
            for state, params in zip(states, whole, strict=True)
        ]

    @cached_property
    def _gather_program(self) -> Wrapped:
        """(shards of parameters) -> whole parameters on every device."""
        shapes = self._model.shapes

        def program(shards: Arrays) -> Arrays:
            specs = {name: self._strategy.spec(shapes[name]) for name in shards}
            gather = partial(self._strategy.gather_params, shapes=shapes)
            mapped: Arrays = shard_map(
                gather, mesh=self._mesh, in_specs=(specs,), out_specs=_WHOLE
            )(shards)
            return mapped

        return exact_jit(program)

    # Sums of gradients, each shard at its owner

    def _pack(self, sums: GradientSums) -> jax.Array:
        """[devices, values]: for each device its shards of the gradients, then the totals."""
        shards = [self._strategy.shards(sums.gradients[name]) for name in self._layout.trained]
        totals = jnp.broadcast_to(sums.totals, (self._mesh.size, len(sums.totals)))
        return jnp.concatenate([*shards, totals], axis=1)

    def _unpack(self, packed: jax.Array) -> GradientSums:
        shapes = self._shard_shapes
        gradients, rest = {}, packed.reshape(-1)
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            gradients[name], rest = rest[:size].reshape(shape), rest[size:]
        return GradientSums(gradients, rest)

    @cached_property
    def _shard_shapes(self) -> dict[str, Shape]:
        """The shapes of a device's shards of the trained parameters."""
        specs = self._model.specs
        return {
            name: self._strategy.shard_shape(specs[name].shape) for name in self._layout.trained
        }

    @cached_property
    def _packed_shape(self) -> Shape:
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shard_shapes.values()]
        return self._mesh.size, sum(sizes) + 2 + 2 * len(self._names)

    @cached_property
    def _exchange_program(self) -> Callable[[int], Wrapped]:
        """Compile, for a number of microbatches, the exchange of subtree sums between devices.

        (packed [devices, subtrees, devices, values], extra [devices, n]) -> the sums along the tree
        of each device's values, [devices, values], and of extra, on every device.
        """
        num_devices = self.plan.layout.num_devices

        def program(count: int, packed: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_all_devices = lax.all_to_all(
                packed[0], AXIS, split_axis=1, concat_axis=0, tiled=False
            )  # [devices, subtrees, values]
            tree: TreeSum[jax.Array] = TreeSum(count, jnp.add)
            for place in range(num_devices):
                nodes = subtrees(microbatches_of(count, place, num_devices), count)
                for number, node in enumerate(nodes):
                    tree.give(node, of_all_devices[place, number])
            return tree.total()[None], lax.psum(extra, AXIS)[0]

        def compiled(count: int) -> Wrapped:
            mapped = shard_map(
                partial(program, count),
                mesh=self._mesh,
                in_specs=_BY_DEVICE,
                out_specs=(_BY_DEVICE, _WHOLE),
            )
            return exact_jit(mapped)

        return cache(compiled)

    def _squared_norms(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        squares = [self._squares_program(values) for values in packed]
        return per_device(
            self._norm_program(self._joined(_BY_DEVICE, squares)), self._local_devices
        )

    @cached_property
    def _norm_program(self) -> Wrapped:
        """(squares of each device's packed sums) -> the sum of those of the gradient; it only adds,
        so its bits are the same on any number of devices.
        """
        shapes = {name: self._model.specs[name].shape for name in self._layout.trained}
        axes = {name: longest_axis(shape) for name, shape in shapes.items() if shape}

        def program(squares: jax.Array) -> jax.Array:
            sums = piece_sums(self._unpack(squares).gradients, axes)
            return sum_of_pieces(
                self._strategy.of_all_rows(array, shapes[name]) for name, array in sums.items()
            )

        mapped = shard_map(program, mesh=self._mesh, in_specs=_BY_DEVICE, out_specs=_WHOLE)
        return exact_jit(mapped)

    # The state as one of arrays that are cut over all devices

    def _joined(self, specs: Any, parts: Sequence[Any]) -> Any:
        """A tree of arrays over all devices, from each local device's parts of them."""

        def join(spec: PartitionSpec, *shards: jax.Array) -> jax.Array:
            cuts = [self._mesh.size if part == AXIS else 1 for part in spec]
            cuts += [1] * (shards[0].ndim - len(cuts))
            shape = tuple(size * cut for size, cut in zip(shards[0].shape, cuts, strict=True))
            sharding = NamedSharding(self._mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

        return jax.tree.map(
            join, specs, *parts, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )

    def one_state(self, state: ReplicaStates) -> State:
        joined: State = self._joined(self._layout.specs, state)
        return joined

    @cached_property
    def _all_finite(self) -> Wrapped:
        return jax.jit(self._layout.finite, out_shardings=self._replicated)

    def gather(self, state: Any) -> list[ArrayShard]:
        return JaxEngine.gather(self, self.one_state(state))

    def digests(self, state: Any) -> dict[str, str]:
        """Digests of whole arrays, which are put together one at a time."""
        shapes = self._layout.shapes
        return {
            name: digest(np.asarray(self._whole_array(shapes[name])(array))).hex()
            for name, array in self.named_arrays(self.one_state(state))
        }

    @cached_property
    def _whole_array(self) -> Callable[[Shape], Wrapped]:
        """Compile, for a shape: (array that may be cut) -> the array on every device."""

        def compiled(shape: Shape) -> Wrapped:
            def without_padding(array: jax.Array) -> jax.Array:
                return lax.slice(array, (0,) * len(shape), shape)

            return jax.jit(without_padding, out_shardings=self._replicated)

        return cache(compiled)


def exact_engine(plan: Plan) -> type[ExactEngine]:
    """The engine of an exact run: whole states on each device, or shards."""
    return ShardedExactEngine if plan.layout.shards > 1 else ExactEngine
