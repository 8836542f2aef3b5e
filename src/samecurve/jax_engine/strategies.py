"""How arrays lie on the devices, and what devices exchange in a step.

Parameters are gathered before a step; gradients are summed once, after all accumulation steps: by
reduce(), or along the tree, where each device adds up what by_owner() packs for it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from samecurve.jax_engine.array_types import Arrays, HostArray, PyTree, ReadBox, Shape
from samecurve.jax_engine.complex_pairs import psum

AXIS = "data"


class Strategy:
    """How the arrays of a state lie on the devices. The base is single and dp: every device holds
    the whole state; a step has one all-reduce.
    """

    sums_spec = PartitionSpec()  # of what of_owners() gives

    def __init__(self, mesh: Mesh, *, cuts_longest: bool = False) -> None:
        """cuts_longest: an array that is cut is cut along its longest axis (row_axis)."""
        self.mesh, self._cuts_longest = mesh, cuts_longest

    def spec(self, _shape: Shape) -> PartitionSpec:
        """The partition of an array of this shape."""
        return PartitionSpec()

    def even_spec(self, shape: Shape) -> PartitionSpec:
        """The same where it needs no padding; else that of an array that every device holds."""
        return self.spec(shape)

    def put(self, shape: Shape, dtype: DTypeLike, read: ReadBox) -> jax.Array:
        """Read values on the host into an array with that partition."""
        values = read((0,) * len(shape), shape).astype(dtype)
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback(shape, sharding, lambda _index: values)

    def local_shard(self, array: jax.Array, shape: Shape) -> tuple[Shape, HostArray]:
        """The offsets of this process's part of an array, and a copy of that part."""
        return (0,) * len(shape), np.array(array.addressable_data(0))

    # Inside the compiled step:

    def gather_params(self, shards: Arrays, _shapes: Mapping[str, Shape]) -> Arrays:
        """Whole parameters, by name, from this device's shards."""
        return shards

    def reduce(self, gradients: Arrays, metrics: PyTree) -> tuple[Arrays, PyTree]:
        """Sums over all devices: this device's shards of the gradients, and whole metrics."""
        gradient_sums, metric_sums = psum((gradients, metrics), AXIS)
        return gradient_sums, metric_sums

    def squared_norm(self, gradients: Arrays) -> jax.Array:
        """The squared norm of the whole gradient, from this device's shards."""
        return squared_norm(gradients.values())

    # Sums along the tree, of which each device adds up a part:

    def shard_shape(self, shape: Shape) -> Shape:
        """The shape of what one device holds of an array."""
        return shape

    def by_owner(self, gradients: Sequence[jax.Array], totals: jax.Array) -> jax.Array:
        """Pack whole gradients, and totals: [devices, values], for each device what it adds up."""
        packed = jnp.concatenate([*(gradient.ravel() for gradient in gradients), totals])
        padding = -len(packed) % self.mesh.size
        return jnp.pad(packed, (0, padding)).reshape(self.mesh.size, -1)

    def of_owners(self, sums: jax.Array, count: int) -> jax.Array:
        """The packed sums that a device goes on with, from those that it has added up: its `count`
        values of shard_shape() each, then the totals.
        """
        gathered = lax.all_gather(sums, AXIS, tiled=True)
        return lax.slice(gathered, (0,), (count,))

    def of_all_rows(self, sums: jax.Array, _shape: Shape) -> jax.Array:
        """The sums of a whole array's rows, from those of this device's rows."""
        return sums


class Sharded(Strategy):
    """fsdp: each array is cut along one axis, and gathered whole once a step.

    The axis is the longest one, or the one that needs least padding to a multiple of the devices.
    """

    sums_spec = PartitionSpec(AXIS)

    def _is_replicated(self, shape: Shape) -> bool:
        """Whether an array can't be cut; then every device holds all of it.

        XLA computes a single number in another way than a row of numbers. So no array is cut into
        single numbers where bits are not to follow the devices.
        """
        cut_to_numbers = self._cuts_longest and math.prod(shape) <= self.mesh.size
        return 0 in shape or not shape or (cut_to_numbers and max(shape) == math.prod(shape))

    def _shard_axis(self, shape: Shape) -> int:
        if self._cuts_longest:
            return row_axis(shape)

        def padded_by(axis: int) -> float:
            return self._padded_size(shape[axis]) / max(1, shape[axis])

        return min(range(len(shape)), key=lambda axis: (padded_by(axis), axis))

    def _padded_size(self, size: int) -> int:
        return -(-size // self.mesh.size) * self.mesh.size

    def spec(self, shape: Shape) -> PartitionSpec:
        if self._is_replicated(shape):
            return PartitionSpec()
        cut = self._shard_axis(shape)
        return PartitionSpec(*(AXIS if axis == cut else None for axis in range(len(shape))))

    def even_spec(self, shape: Shape) -> PartitionSpec:
        if self._is_replicated(shape) or shape[self._shard_axis(shape)] % self.mesh.size:
            return PartitionSpec()
        return self.spec(shape)

    def put(self, shape: Shape, dtype: DTypeLike, read: ReadBox) -> jax.Array:
        if self._is_replicated(shape):
            return super().put(shape, dtype, read)
        axis = self._shard_axis(shape)
        padded_size = self._padded_size(shape[axis])
        shard_shape = _with(shape, axis, padded_size // self.mesh.size)

        def shard(index: tuple[slice, ...] | None) -> HostArray:
            """The values of one device: the array's, and zeros beyond the array's end."""
            assert index is not None
            begin = index[axis].start or 0
            end = padded_size if index[axis].stop is None else index[axis].stop
            first, last = min(begin, shape[axis]), min(end, shape[axis])
            padded = np.zeros(shard_shape, dtype)
            if last > first:
                offsets = _with((0,) * len(shape), axis, first)
                values = read(offsets, _with(shape, axis, last - first))
                padded[tuple(slice(size) for size in values.shape)] = values
            return padded

        sharding = NamedSharding(self.mesh, self.spec(shape))
        return jax.make_array_from_callback(_with(shape, axis, padded_size), sharding, shard)

    def local_shard(self, array: jax.Array, shape: Shape) -> tuple[Shape, HostArray]:
        if self._is_replicated(shape):
            return super().local_shard(array, shape)
        axis = self._shard_axis(shape)
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
        first = shards[0].index[axis].start or 0
        values = np.concatenate([np.asarray(shard.data) for shard in shards], axis)
        without_padding = [slice(None)] * len(shape)
        without_padding[axis] = slice(max(0, shape[axis] - first))
        offsets = _with((0,) * len(shape), axis, first)
        return offsets, np.ascontiguousarray(values[tuple(without_padding)])

    def gather_params(self, shards: Arrays, shapes: Mapping[str, Shape]) -> Arrays:
        gathered: Arrays = {}
        for name, shard in shards.items():
            gathered[name] = shard
            if not self._is_replicated(shapes[name]):
                axis = self._shard_axis(shapes[name])
                gathered[name] = lax.all_gather(shard, AXIS, axis=axis, tiled=True)
        return {
            name: lax.slice(array, (0,) * array.ndim, shapes[name])
            for name, array in gathered.items()
        }

    def reduce(self, gradients: Arrays, metrics: PyTree) -> tuple[Arrays, PyTree]:
        shards = {name: self._reduce_scatter(gradient) for name, gradient in gradients.items()}
        return shards, psum(metrics, AXIS)

    def _reduce_scatter(self, gradient: jax.Array) -> jax.Array:
        if self._is_replicated(gradient.shape):
            total: jax.Array = lax.psum(gradient, AXIS)
            return total
        axis = self._shard_axis(gradient.shape)
        padded = self._padded(gradient, axis)
        shard: jax.Array = lax.psum_scatter(padded, AXIS, scatter_dimension=axis, tiled=True)
        return shard

    def _padded(self, array: jax.Array, axis: int) -> jax.Array:
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, self._padded_size(array.shape[axis]) - array.shape[axis])
        return jnp.pad(array, padding)

    def squared_norm(self, gradients: Arrays) -> jax.Array:
        sharded = [shard for shard in gradients.values() if shard.size and shard.ndim]
        scalars = [shard for shard in gradients.values() if not shard.ndim]
        total: jax.Array = lax.psum(squared_norm(sharded), AXIS) + squared_norm(scalars)
        return total

    def shard_shape(self, shape: Shape) -> Shape:
        if self._is_replicated(shape):
            return shape
        axis = self._shard_axis(shape)
        return _with(shape, axis, self._padded_size(shape[axis]) // self.mesh.size)

    def by_owner(self, gradients: Sequence[jax.Array], totals: jax.Array) -> jax.Array:
        to_all = jnp.broadcast_to(totals, (self.mesh.size, len(totals)))
        return jnp.concatenate([*map(self._shards, gradients), to_all], axis=1)

    def _shards(self, array: jax.Array) -> jax.Array:
        """The numbers of each device's shard of a whole array, [devices, numbers]."""
        count = self.mesh.size
        if self._is_replicated(array.shape):
            return jnp.broadcast_to(array.reshape(1, -1), (count, array.size))
        axis = self._shard_axis(array.shape)
        rows = jnp.moveaxis(self._padded(array, axis), axis, 0)
        apart = rows.reshape(count, -1, *rows.shape[1:])
        return jnp.moveaxis(apart, 1, axis + 1).reshape(count, -1)

    def of_owners(self, sums: jax.Array, _count: int) -> jax.Array:
        return sums

    def of_all_rows(self, sums: jax.Array, shape: Shape) -> jax.Array:
        if self._is_replicated(shape):
            return sums
        rows = shape[self._shard_axis(shape)]
        pieces = len(sums) * self.mesh.size // self._padded_size(rows)
        gathered: jax.Array = lax.all_gather(sums, AXIS, tiled=True)
        return gathered[: rows * pieces]


def row_axis(shape: Shape) -> int:
    """The longest axis of an array, whose indices are its rows; the first of several."""
    return max(range(len(shape)), key=lambda axis: (shape[axis], -axis))


def _with(shape: Shape, axis: int, size: int) -> Shape:
    """The shape with this size along one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def squared_norm(gradients: Iterable[jax.Array]) -> jax.Array:
    return sum((jnp.vdot(g, g) for g in gradients), start=jnp.zeros(()))


STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dp": Strategy,
    "fsdp": Sharded,
}
