"""How arrays lie on the devices, and what devices exchange in a step.

Parameters are gathered before a step; gradients are summed once, after all accumulation steps.
"""

from collections.abc import Iterable, Mapping

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

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

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


class Sharded(Strategy):
    """fsdp: each array is cut along one axis, and gathered whole once a step.

    The axis is the one that needs least padding to a multiple of the devices.
    """

    def _is_replicated(self, shape: Shape) -> bool:
        """Whether an array can't be cut; then every device holds all of it."""
        return 0 in shape or not shape

    def _shard_axis(self, shape: Shape) -> int:
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
        size = gradient.shape[axis]
        padding = [(0, 0)] * gradient.ndim
        padding[axis] = (0, self._padded_size(size) - size)
        padded = jnp.pad(gradient, padding)
        shard: jax.Array = lax.psum_scatter(padded, AXIS, scatter_dimension=axis, tiled=True)
        return shard

    def squared_norm(self, gradients: Arrays) -> jax.Array:
        sharded = [shard for shard in gradients.values() if shard.size and shard.ndim]
        scalars = [shard for shard in gradients.values() if not shard.ndim]
        total: jax.Array = lax.psum(squared_norm(sharded), AXIS) + squared_norm(scalars)
        return total


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
