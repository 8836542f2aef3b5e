"""train.exact under jax: each slot's gradient by a program of its own without collectives, so that
one device runs the very program that eight run; what the slots give is added along the step's tree
(core/determinism/microbatches.py) outside of it. So is the update a program for one device. Only
the exchange spans devices, and it moves values about and adds them element by element.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, split_batch, subtrees
from samecurve.core.eval_sums import EvalSums, SumSpecs, size, unpack_sums
from samecurve.core.protocols import ArrayShard, Batch, Checkpoint, Round, Sample
from samecurve.jax_engine.checkpoint import State, all_params
from samecurve.jax_engine.engine import JaxEngine, QueuedMetrics, StagedRounds
from samecurve.jax_engine.step_program import (
    Arrays,
    apply_update,
    microbatch_gradients,
    microbatch_metrics,
    split_trained,
)
from samecurve.jax_engine.strategies import AXIS, squared_norm

MicroBatchSums = tuple[Arrays, jax.Array]  # gradients, [loss sum, weight]


@dataclass(frozen=True)
class StagedMicroBatch:
    """A slot on its device, filled up to plan.micro rows.

    place: which of this process's devices.
    """

    number: int
    local_device: int
    rows: Arrays
    real: jax.Array


class ExactEngine(JaxEngine):
    """A state is a list of whole states, one for each device of this process."""

    def init(self, weights: Checkpoint | None = None) -> Any:
        return self._per_device(super().init(weights))

    def restore(self, saved: Checkpoint) -> Any:
        return self._per_device(super().restore(saved))

    def _per_device(self, state: State) -> list[State]:
        leaves, tree = jax.tree.flatten(state)
        shards = [
            {shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves
        ]
        return [
            jax.tree.unflatten(tree, [shard[device] for shard in shards])
            for device in self._local_devices
        ]

    def stage(self, rounds: Sequence[Round], of: int) -> Any:
        return [
            self._staged(place, slot.number, slot.arrays)
            for found in rounds
            for place, slot in enumerate(found)
            if slot and slot.real
        ]

    def _staged(self, place: int, number: int, arrays: Any) -> StagedMicroBatch:
        count = len(next(iter(arrays.values())))
        rows = {
            name: self._narrow(
                name,
                np.concatenate(
                    [array, np.repeat(array[:1], self.plan.micro_batch_size - count, axis=0)]
                ),
            )
            for name, array in arrays.items()
        }
        return StagedMicroBatch(
            number,
            place,
            *jax.device_put(
                (rows, np.arange(self.plan.micro_batch_size) < count), self._local_devices[place]
            ),
        )

    def step(
        self, state: Any, batch: Batch, lr: float, asked: Sequence[int]
    ) -> tuple[Any, QueuedMetrics]:
        staged: list[StagedMicroBatch] = batch.rounds
        if staged and not self._checked:
            rows = {name: np.asarray(array[:1]) for name, array in staged[0].rows.items()}
            self._check_used(StagedRounds({}, staged[0].real, rows))
        count = len(split_batch(batch.samples, self.plan.micro_batch_size))
        sums = [TreeSum[MicroBatchSums](count, self._add_program) for _ in self._local_devices]
        for slot in staged:
            own = state[slot.local_device]
            sums[slot.local_device].give(
                (0, slot.number),
                self._microbatch_program(all_params(own), slot.rows, slot.real, own["scale"]),
            )
        figures = self._shared_metrics(batch, asked)
        totals = self._reduce(
            count, [[value for _, value in one.held] for one in sums], self._to_all_reduce(figures)
        )
        rate = np.asarray(lr, self._dtype)
        state, values = zip(
            *(
                self._update_program(own, *total, rate)
                for own, total in zip(state, totals, strict=True)
            ),
            strict=True,
        )
        return list(state), QueuedMetrics(values[0], figures, self.plan.world_size)

    @cached_property
    def _microbatch_program(self) -> Any:
        def program(
            whole: Arrays, rows: Arrays, real: jax.Array, scale: jax.Array
        ) -> MicroBatchSums:
            params, merge = split_trained(self._model, whole, self._layout.trained)
            return microbatch_gradients(
                self.task, merge, params, rows, real, scale / self.plan.nominal_weight
            )

        return jax.jit(program)

    @cached_property
    def _add_program(self) -> Any:
        return jax.jit(lambda left, right: jax.tree.map(jnp.add, left, right), donate_argnums=0)

    @cached_property
    def _update_program(self) -> Any:
        """(state, a step's gradients and sums in one row, what processes add up, lr) -> (state,
        figures).
        """

        def program(
            state: State, row: jax.Array, extra: jax.Array, lr: jax.Array
        ) -> tuple[State, jax.Array]:
            gradients, at = {}, 0
            for name in self._layout.trained:
                shape = self._model.specs[name].shape
                size = int(np.prod(shape, dtype=np.int64))
                gradients[name] = row[at : at + size].reshape(shape)
                at += size
            sums = row[at:]
            state, figures = apply_update(
                self.plan,
                self._optimizer,
                self._layout,
                state,
                gradients,
                sums,
                squared_norm(gradients.values()),
                lr,
            )
            return state, jnp.concatenate([sums, extra, figures])

        return jax.jit(program, donate_argnums=0)

    @cached_property
    def _pack_program(self) -> Any:
        """What one device has, as [1, nodes, values]: no arithmetic."""

        def program(held: list[MicroBatchSums]) -> jax.Array:
            return jnp.stack(
                [
                    jnp.concatenate(
                        [*(gradients[name].ravel() for name in self._layout.trained), sums]
                    )
                    for gradients, sums in held
                ]
            )[None]

        return jax.jit(program)

    def _reduce(
        self, count: int, held: Sequence[list[MicroBatchSums]], extra: Any
    ) -> list[tuple[jax.Array, jax.Array]]:
        """On each device of this process the sum over all slots, and what processes add up."""
        most = max(
            len(subtrees(microbatches_of(count, place, self.plan.num_devices), count))
            for place in range(self.plan.num_devices)
        )
        rows = [
            (
                self._pack_program(own + own[-1:] * (most - len(own)))
                if own
                else self._empty_pack(place, most)
            )
            for place, own in enumerate(held)
        ]
        given = jax.make_array_from_single_device_arrays(
            (self.plan.num_devices, *rows[0].shape[1:]), self._by_device, rows
        )
        found = [
            {shard.device: shard.data for shard in array.addressable_shards}
            for array in self._exchange_program(count)(given, extra)
        ]
        return [(found[0][device], found[1][device]) for device in self._local_devices]

    def _empty_pack(self, place: int, most: int) -> jax.Array:
        length = (
            sum(
                int(np.prod(self._model.specs[name].shape, dtype=np.int64))
                for name in self._layout.trained
            )
            + 2
        )
        made: jax.Array = jax.device_put(
            np.zeros((1, most, length), self._dtype), self._local_devices[place]
        )
        return made

    @cached_property
    def _exchange_program(self) -> Any:
        """count -> (rows [devices, nodes, values], extra [devices, n]) -> their sums along the
        tree, and extra's, on every device.
        """
        world = self.plan.num_devices

        def program(count: int, rows: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
            (held,) = rows
            part = -(-held.shape[1] // world)
            cut = jnp.pad(held, ((0, 0), (0, part * world - held.shape[1]))).reshape(
                len(held), world, part
            )
            theirs = lax.all_to_all(
                cut, AXIS, split_axis=1, concat_axis=0, tiled=False
            )  # [devices, nodes, part]
            sums: TreeSum[jax.Array] = TreeSum(count, jnp.add)
            for place in range(world):
                for number, node in enumerate(
                    subtrees(microbatches_of(count, place, world), count)
                ):
                    sums.give(node, theirs[place, number])
            whole: jax.Array = lax.slice(
                lax.all_gather(sums.total(), AXIS, tiled=True), (0,), held.shape[1:]
            )
            shared: jax.Array = lax.psum(extra, AXIS)[0]
            return whole, shared

        def made(count: int) -> Any:
            mapped: Any = jax.shard_map(
                partial(program, count),
                mesh=self._mesh,
                in_specs=PartitionSpec(AXIS),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            return jax.jit(mapped)

        return cache(made)

    def evaluate(self, state: Any, rounds: Iterable[Any]) -> EvalSums:
        """Counts are added as integers; the other sums along the tree, a row for each microbatch."""
        specs = self.task.eval_sums()
        by_microbatch = [
            (
                microbatch.number,
                self._metrics_program(
                    all_params(state[microbatch.local_device]), microbatch.rows, microbatch.real
                ),
            )
            for staged in rounds
            for microbatch in staged
        ]
        rows = np.zeros(
            (
                len(split_batch(self.plan.eval_samples, self.plan.micro_batch_size)),
                size(specs, integer=False),
            ),
            self._dtype,
        )
        counts = np.zeros(size(specs, integer=True), np.int64)
        for number, sums in by_microbatch:
            rows[number] = _in_a_row(specs, sums, self._dtype, integer=False)
            counts += _in_a_row(specs, sums, np.int64, integer=True)
        tree: TreeSum[NDArray[Any]] = TreeSum(len(rows), np.add)
        for number, row in enumerate(self._sum_over_processes(rows).astype(np.float64)):
            tree.give((0, number), row)
        return unpack_sums(specs, tree.total(), self._counted(counts))

    @cached_property
    def _metrics_program(self) -> Any:
        return jax.jit(
            lambda params, rows, real: microbatch_metrics(
                self.task, self._model, self.task.eval_sums(), params, rows, real, self._dtype
            )
        )

    def _counted(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum over processes; each sends its 64 bits as pairs of 32, which jax leaves whole."""
        if self.plan.world_size == 1 or not len(counts):
            return counts
        by_process = np.zeros((self.plan.world_size, 2 * len(counts)), np.int32)
        by_process[self._index] = counts.view(np.int32)
        sent = np.ascontiguousarray(self._sum_over_processes(by_process))
        total: NDArray[np.int64] = sent.view(np.int64).sum(axis=0)
        return total

    def _sum_over_processes(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Each row from the one process that filled it: zeros are all that is added."""
        if self.plan.world_size == 1:
            return rows
        own = np.zeros((len(self._local_devices), *rows.shape), rows.dtype)
        own[0] = rows
        add = jax.jit(
            jax.shard_map(
                lambda part: lax.psum(part[0], AXIS),
                mesh=self._mesh,
                in_specs=PartitionSpec(AXIS),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )
        return np.asarray(add(self._put(own)))

    def sample(self, state: Any, step: int) -> Sequence[Sample]:
        return self.task.sample(
            self._model.merge(all_params(state[0])), self.plan.fixed.seed + step
        )

    def gather(self, state: Any) -> list[ArrayShard]:
        return self._layout.gather(
            state[0],
            np.asarray(jax.jit(self._layout.finite)(state[0])).tolist(),
            self._index,
            self.plan.world_size,
        )

    def digests(self, state: Any) -> dict[str, str]:
        return super().digests(state[0])


def _in_a_row(specs: SumSpecs, sums: Arrays, dtype: Any, *, integer: bool) -> NDArray[Any]:
    chosen = [name for name, spec in specs.items() if spec.integer == integer]
    parts = [np.asarray(sums[name], dtype).reshape(-1) for name in chosen]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
