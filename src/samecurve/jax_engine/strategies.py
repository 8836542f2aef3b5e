"""How arrays lie on the devices, and what passes between these in a step: gathered before it,
gradients summed after all rounds, once.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from samecurve.jax_engine.complex_pairs import psum

AXIS = "data"
ReadPart = Callable[
    [tuple[int, ...], tuple[int, ...]], NDArray[Any]
]  # offsets, shape -> a box of an array


class Strategy(Protocol):
    """spec: how an array of this shape is laid out.

    put: an array laid out so, of host values. box: what this process holds of it, and where that
    begins.

    Inside the compiled step: whole: name -> parameter, from this device's part; reduce: the sum
    over all devices of gradients, this device's part of it, and of figures; square: of the norm of
    the whole gradient, given such parts.
    """

    mesh: Mesh

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec: ...
    def put(self, shape: tuple[int, ...], dtype: Any, part: ReadPart) -> jax.Array: ...
    def local_shard(
        self, array: jax.Array, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], NDArray[Any]]: ...
    def gather_params(
        self, parts: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, jax.Array]: ...
    def reduce(
        self, gradients: dict[str, jax.Array], figures: Any
    ) -> tuple[dict[str, jax.Array], Any]: ...
    def squared_norm(self, gradients: dict[str, jax.Array]) -> jax.Array: ...


class Replicated:
    """single, dp: every device holds everything; one all-reduce a step, gradients and figures
    together.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec()

    def put(self, shape: tuple[int, ...], dtype: Any, part: ReadPart) -> jax.Array:
        found = part((0,) * len(shape), shape).astype(dtype)
        return jax.make_array_from_callback(
            shape, NamedSharding(self.mesh, PartitionSpec()), lambda index: found
        )

    def local_shard(
        self, array: jax.Array, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], NDArray[Any]]:
        return (0,) * len(shape), np.array(array.addressable_data(0))

    def gather_params(
        self, parts: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, jax.Array]:
        return parts

    def reduce(
        self, gradients: dict[str, jax.Array], figures: Any
    ) -> tuple[dict[str, jax.Array], Any]:
        found: tuple[dict[str, jax.Array], Any] = psum((gradients, figures), AXIS)
        return found

    def squared_norm(self, gradients: dict[str, jax.Array]) -> jax.Array:
        return squared_norm(gradients.values())


class Sharded:
    """fsdp: each array cut along the dimension that wastes least when padded to a multiple of the
    devices; gathered whole once a step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._count = mesh, mesh.size

    def _is_replicated(self, shape: tuple[int, ...]) -> bool:
        """Whether there is nothing to cut: such an array is the same on every device."""
        return 0 in shape or not shape

    def _shard_axis(self, shape: tuple[int, ...]) -> int:
        return min(
            range(len(shape)),
            key=lambda axis: (self._padded_size(shape[axis]) / max(1, shape[axis]), axis),
        )

    def _padded_size(self, size: int) -> int:
        return -(-size // self._count) * self._count

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        return (
            PartitionSpec(
                *(AXIS if axis == self._shard_axis(shape) else None for axis in range(len(shape)))
            )
            if not self._is_replicated(shape)
            else PartitionSpec()
        )

    def put(self, shape: tuple[int, ...], dtype: Any, part: ReadPart) -> jax.Array:
        if self._is_replicated(shape):
            return Replicated(self.mesh).put(shape, dtype, part)
        axis = self._shard_axis(shape)
        padded = (*shape[:axis], self._padded_size(shape[axis]), *shape[axis + 1 :])

        def piece(index: tuple[slice, ...] | None) -> NDArray[Any]:
            assert index is not None
            first, last = (
                min(at, shape[axis])
                for at in (
                    index[axis].start or 0,
                    padded[axis] if index[axis].stop is None else index[axis].stop,
                )
            )
            made = np.zeros((*shape[:axis], padded[axis] // self._count, *shape[axis + 1 :]), dtype)
            if last > first:
                offsets = tuple(
                    first if dimension == axis else 0 for dimension in range(len(shape))
                )
                found = part(offsets, (*shape[:axis], last - first, *shape[axis + 1 :]))
                made[tuple(slice(size) for size in found.shape)] = found
            return made

        return jax.make_array_from_callback(
            padded, NamedSharding(self.mesh, self.spec(shape)), piece
        )

    def local_shard(
        self, array: jax.Array, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], NDArray[Any]]:
        if self._is_replicated(shape):
            return Replicated(self.mesh).local_shard(array, shape)
        axis = self._shard_axis(shape)
        mine = sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
        first = mine[0].index[axis].start or 0
        joined = np.concatenate([np.asarray(shard.data) for shard in mine], axis)
        keep = tuple(
            slice(max(0, shape[axis] - first)) if dimension == axis else slice(None)
            for dimension in range(len(shape))
        )
        return tuple(
            first if dimension == axis else 0 for dimension in range(len(shape))
        ), np.ascontiguousarray(joined[keep])

    def gather_params(
        self, parts: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, jax.Array]:
        gathered = {
            name: (
                lax.all_gather(part, AXIS, axis=self._shard_axis(shapes[name]), tiled=True)
                if not self._is_replicated(shapes[name])
                else part
            )
            for name, part in parts.items()
        }
        return {
            name: lax.slice(array, (0,) * array.ndim, shapes[name])
            for name, array in gathered.items()
        }

    def reduce(
        self, gradients: dict[str, jax.Array], figures: Any
    ) -> tuple[dict[str, jax.Array], Any]:
        return {name: self._reduce_scatter(gradient) for name, gradient in gradients.items()}, psum(
            figures, AXIS
        )

    def _reduce_scatter(self, gradient: jax.Array) -> jax.Array:
        if self._is_replicated(gradient.shape):
            found: jax.Array = lax.psum(gradient, AXIS)
            return found
        axis = self._shard_axis(gradient.shape)
        more = self._padded_size(gradient.shape[axis]) - gradient.shape[axis]
        padded = jnp.pad(
            gradient, [(0, more if dimension == axis else 0) for dimension in range(gradient.ndim)]
        )
        scattered: jax.Array = lax.psum_scatter(padded, AXIS, scatter_dimension=axis, tiled=True)
        return scattered

    def squared_norm(self, gradients: dict[str, jax.Array]) -> jax.Array:
        cut, alike = (
            [g for g in gradients.values() if g.size and g.ndim],
            [g for g in gradients.values() if not g.ndim],
        )
        found: jax.Array = lax.psum(squared_norm(cut), AXIS) + squared_norm(alike)
        return found


def squared_norm(gradients: Iterable[jax.Array]) -> jax.Array:
    return sum((jnp.vdot(g, g) for g in gradients), start=jnp.zeros(()))


STRATEGIES: dict[str, Callable[[Mesh], Strategy]] = {
    "single": Replicated,
    "dp": Replicated,
    "fsdp": Sharded,
}
