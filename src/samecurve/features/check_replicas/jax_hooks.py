"""The comparison in engine jax: the bits of the arrays that every device holds whole are compared
over all devices of all processes.

One program hashes them on each device, and gives all hashes to every process. jax itself takes for
granted that copies are equal, and reads one of them.
"""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from samecurve.features.check_replicas.verdict import ReplicaHashes, check_alike
from samecurve.jax_engine.bit_sums import bit_sums
from samecurve.jax_engine.feature_hooks import JaxHooks
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.strategies import AXIS


class Hooks(JaxHooks):
    """Compares the devices of a mesh when the loop asks for it."""

    def compare(self, state: Any, step: int) -> int:
        """Compare after so many steps, in all processes. Returns the number of arrays that were
        compared: those that every device holds whole.

        RunError: an array differs.
        """
        named = dict(self.engine.named_arrays(state))
        whole = {name: array for name, array in named.items() if array.is_fully_replicated}
        names = sorted(whole, key=lambda name: not name.startswith("model/"))
        if not names:
            return 0
        halves = np.asarray(self._hashes([whole[name] for name in names]))
        hashes = np.ascontiguousarray(halves).view(np.int64)[..., 0]
        check_alike(ReplicaHashes(names, hashes, np.zeros_like(hashes)), self.engine.plan, step)
        return len(names)

    @cached_property
    def _hashes(self) -> Wrapped:
        """Compile: (arrays) -> [devices, arrays, 2], the two halves of each hash."""

        def program(arrays: list[jax.Array]) -> jax.Array:
            own = jnp.stack([bit_sums(array) for array in arrays])
            gathered: jax.Array = lax.all_gather(own, AXIS)
            return gathered

        whole = PartitionSpec()
        return jax.jit(
            shard_map(
                program, mesh=self.engine.setup.strategy.mesh, in_specs=whole, out_specs=whole
            )
        )
