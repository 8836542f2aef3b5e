"""train.check_replicas under jax: the bits of the arrays that every device holds whole are compared
over all devices of all processes.

One program hashes them on each device, and gives all hashes to every process. jax itself takes for
granted that copies are equal, and reads one of them.
"""

from collections.abc import Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Wrapped

from samecurve.core.planning.plan import Plan
from samecurve.core.replica_check import ReplicaHashes, check_alike
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.strategies import AXIS

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes
_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15))  # of the two halves of a hash
_MIX = np.uint32(0x85EBCA6B)  # odd


class ReplicaCheck:
    """Compares the devices of a mesh."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh

    def compare(self, named: Mapping[str, jax.Array], step: int) -> int:
        """Compare after a step, in all processes. Returns the number of arrays that were compared.

        named: arrays by name; those of which a device holds a part alone are left out
        step: how many are done

        RunError: an array differs.
        """
        whole = {name: array for name, array in named.items() if array.is_fully_replicated}
        names = sorted(whole, key=lambda name: not name.startswith("model/"))
        if not names:
            return 0
        halves = np.asarray(self._hashes([whole[name] for name in names]))
        hashes = np.ascontiguousarray(halves).view(np.int64)[..., 0]
        check_alike(ReplicaHashes(names, hashes, np.zeros_like(hashes)), self._plan, step)
        return len(names)

    @cached_property
    def _hashes(self) -> Wrapped:
        """Compile: (arrays) -> [devices, arrays, 2], the two halves of each hash."""

        def program(arrays: list[jax.Array]) -> jax.Array:
            own = jnp.stack([bit_sums(array) for array in arrays])
            gathered: jax.Array = lax.all_gather(own, AXIS)
            return gathered

        whole = PartitionSpec()
        return jax.jit(shard_map(program, mesh=self._mesh, in_specs=whole, out_specs=whole))


def bit_sums(array: jax.Array) -> jax.Array:
    """The two halves of an array's hash: sums of its bits times odd factors of their places, modulo
    2^32. A single number that differs changes both.
    """
    values = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    unsigned = _UNSIGNED[values.dtype.itemsize]
    bits = lax.bitcast_convert_type(values.reshape(-1), unsigned).reshape(-1).astype(jnp.uint32)
    places = lax.iota(jnp.uint32, len(bits))
    return jnp.stack([(bits * _factors(places, seed)).sum(dtype=jnp.uint32) for seed in _SEEDS])


def _factors(places: jax.Array, seed: np.uint32) -> jax.Array:
    """Odd numbers that look like random ones, each a function of its place."""
    mixed = (places + seed) * seed
    mixed = (mixed ^ (mixed >> 15)) * _MIX
    return (mixed ^ (mixed >> 13)) | 1
