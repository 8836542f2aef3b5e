"""The sums of an evaluation in an order that does not depend on the devices.

Counts add up as integers, the others along the tree over the evaluation's microbatches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from samecurve.core.determinism.microbatches import TreeSum
from samecurve.core.evaluation import EvalSum, SumSpecs, size, unpack_sums
from samecurve.jax_engine.array_types import Arrays, HostArray

SumOverProcesses = Callable[[HostArray], HostArray]  # each adds its rows to the others' zeros


class OwnSums:
    """The sums of the microbatches that this process has, to be added to those of the others."""

    def __init__(self, specs: SumSpecs, num_microbatches: int, dtype: DTypeLike) -> None:
        self._specs = specs
        self._rows = np.zeros((num_microbatches, size(specs, integer=False)), dtype)
        self._counts = np.zeros(size(specs, integer=True), np.int64)

    def give(self, number: int, sums: Arrays) -> None:
        """Take the sums of one microbatch, by name."""
        self._rows[number] = self._in_a_row(sums, self._rows.dtype, integer=False)
        self._counts += self._in_a_row(sums, np.int64, integer=True)

    def _in_a_row(self, sums: Arrays, dtype: DTypeLike, *, integer: bool) -> HostArray:
        """The integer sums as one row, or all other sums."""
        chosen = [name for name, spec in self._specs.items() if spec.integer == integer]
        parts = [np.asarray(sums[name], dtype).reshape(-1) for name in chosen]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def totals(
        self, world_size: int, index: int, over_processes: SumOverProcesses
    ) -> dict[str, EvalSum]:
        """The sums over all microbatches of all processes, of which this one has the index."""
        tree: TreeSum[NDArray[Any]] = TreeSum(len(self._rows), np.add)
        for number, row in enumerate(over_processes(self._rows).astype(np.float64)):
            tree.give((0, number), row)
        counts = self._counts
        if world_size > 1 and len(counts):
            counts = _sum_counts(counts, world_size, index, over_processes)
        return unpack_sums(self._specs, tree.total(), counts)


def _sum_counts(
    counts: NDArray[np.int64], world_size: int, index: int, over_processes: SumOverProcesses
) -> NDArray[np.int64]:
    """The sum over processes. Counts travel as pairs of 32 bits: jax would cut 64 bits."""
    by_process = np.zeros((world_size, 2 * len(counts)), np.int32)
    by_process[index] = counts.view(np.int32)
    halves = np.ascontiguousarray(over_processes(by_process))
    total: NDArray[np.int64] = halves.view(np.int64).sum(axis=0)
    return total
