"""The sums of an evaluation, in an order that does not depend on the devices.

Each process computes its microbatches. Then counts are added as integers over processes, the other
sums along the tree over the evaluation's microbatches. A loss over the whole batch is computed from
the features of all held-out samples, batch by batch, the same in every process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.stages import Wrapped
from numpy.typing import DTypeLike, NDArray

from samecurve.core.determinism import Mean
from samecurve.core.determinism.microbatches import TreeSum, count_microbatches, split_batch
from samecurve.core.evaluation import EvalSum, EvalSums, SumSpecs, size, unpack_sums
from samecurve.core.protocols import Progress, TrialRows
from samecurve.jax_engine.array_types import Arrays, HostArray
from samecurve.jax_engine.batch_loss import features_program, loss_totals
from samecurve.jax_engine.checkpoint import State, averaged_params
from samecurve.jax_engine.sharded_calls import over_devices
from samecurve.jax_engine.staging import StagedMicroBatch, StagedRounds, Staging
from samecurve.jax_engine.step_program import OUTSIDE, Setup, microbatch_metrics, progress_array
from samecurve.jax_engine.strategies import AXIS

RealAndIdle = tuple[EvalSums, EvalSums]  # sums of rows, and of rows that only fill up a shape


class Measured(NamedTuple):
    """A microbatch of an evaluation, computed on a device."""

    number: int | None  # which of the evaluation; None: a copy of a row, to be dropped
    sums: Arrays
    # for a loss over the whole batch: a row for each sample, and the samples' places
    features: Arrays
    position: jax.Array | None


class Evaluation:
    """Evaluations of a run, with whole weights on each device. index: the number of this process"""

    def __init__(self, setup: Setup, staging: Staging, index: int) -> None:
        self._setup, self._staging, self._index = setup, staging, index
        self._plan = setup.plan

    def sums(
        self, state: State, rounds: Iterable[StagedRounds], progress: Progress, samples: int
    ) -> EvalSums:
        """The task's sums over all held-out samples, of which there are so many.

        A round is queued once the one before it is computed: a round's sign of life is to mean that
        those before it are done.
        """
        params = self._setup.whole_params(averaged_params(state))
        when = progress_array(progress)
        measured: list[Measured] = []
        for staged in rounds:
            jax.block_until_ready(measured[-len(params) :])
            measured += [self._measure(params, one, when) for one in staged.rows]
        totals = self._added(measured, samples)
        if self._plan.sees_whole_batch:
            loss = self._batch_loss(measured, when, samples)
            totals.update({"loss.sum": loss.sum, "loss.weight": loss.weight})
        return totals

    def trial_sums(self, state: State, rows: TrialRows, numbers: Sequence[int]) -> RealAndIdle:
        """The task's sums of these rows, and those of rows that all only fill up a shape."""
        params = self._setup.whole_params(averaged_params(state))
        microbatch = rows.pick(numbers)
        idle = replace(microbatch, real=False)
        when = progress_array(self._plan.progress_at(rows.step))
        specs = self._setup.task.eval_sums()
        real, of_idle = (
            {
                name: np.asarray(sums[name]).reshape(spec.shape).tolist()
                for name, spec in specs.items()
            }
            for sums in (
                self._measure(params, one, when).sums
                for one in self._staging.one_by_one([(microbatch,), (idle,)])
            )
        )
        return real, of_idle

    def _measure(
        self, params: Sequence[Arrays], microbatch: StagedMicroBatch, when: HostArray
    ) -> Measured:
        own, rows = params[microbatch.local_device], microbatch.rows
        features: Arrays = {}
        if self._plan.sees_whole_batch:
            floats, others = self._features_program(own, rows, when)
            features = {**floats, **others}
        sums = self._metrics_program(own, rows, when)
        return Measured(microbatch.number, sums, features, rows.position)

    @cached_property
    def _metrics_program(self) -> Wrapped:
        """(parameters, rows, when) -> a microbatch's sums by name."""
        return self._setup.compiled(partial(microbatch_metrics, self._setup))

    @cached_property
    def _features_program(self) -> Wrapped:
        return features_program(self._setup, self._setup.model.merge_for_eval)

    def _added(self, measured: Sequence[Measured], samples: int) -> dict[str, EvalSum]:
        """The sums over all microbatches of all processes."""
        specs = self._setup.task.eval_sums()
        count = count_microbatches(samples, self._plan.batch.micro_batch_size)
        rows = np.zeros((count, size(specs, integer=False)), self._setup.dtype)
        counts = np.zeros(size(specs, integer=True), np.int64)
        for number, sums, *_ in measured:
            if number is not None:
                rows[number] += _in_a_row(specs, sums, rows.dtype, integer=False)
                counts += _in_a_row(specs, sums, np.int64, integer=True)
        tree: TreeSum[NDArray[Any]] = TreeSum(count, np.add)
        for number, row in enumerate(self._over_processes(rows).astype(np.float64)):
            tree.give((0, number), row)
        return unpack_sums(specs, tree.total(), self._sum_counts(counts))

    def _sum_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum over processes. Counts travel as pairs of 32 bits: jax would cut 64 bits."""
        by_process = np.zeros((self._plan.layout.world_size, 2 * len(counts)), np.int32)
        by_process[self._index] = counts.view(np.int32)
        halves = np.ascontiguousarray(self._over_processes(by_process))
        total: NDArray[np.int64] = halves.view(np.int64).sum(axis=0)
        return total

    def _batch_loss(self, measured: Sequence[Measured], when: HostArray, samples: int) -> Mean:
        """The summed losses of the global batches of held-out samples; the last may be short."""
        whole = {}
        for name, like in measured[0].features.items():
            rows = np.zeros((samples, *like.shape[1:]), like.dtype)
            for one in measured:
                position = np.asarray(one.position)
                real = position != OUTSIDE
                rows[position[real]] = np.asarray(one.features[name])[real]
            whole[name] = self._gathered(rows)
        loss = np.zeros(2)
        for begin, end in split_batch(samples, self._plan.batch.global_batch_size):
            batch = {name: rows[begin:end] for name, rows in whole.items()}
            loss += np.asarray(self._loss_program(batch, when), np.float64)
        return Mean(*loss.tolist())

    @cached_property
    def _loss_program(self) -> Wrapped:
        """(features of a whole batch, when) -> its loss sum and weight."""
        return self._setup.compiled(partial(loss_totals, self._setup))

    def _gathered(self, rows: HostArray) -> HostArray:
        """Rows, of which one process each has the values and the others zeros, bit by bit."""
        encoded = rows.tobytes()
        words = np.frombuffer(encoded + bytes(-len(encoded) % 4), np.int32)
        summed = self._over_processes(words).tobytes()[: len(encoded)]
        return np.frombuffer(summed, rows.dtype).reshape(rows.shape)

    def _over_processes(self, rows: HostArray) -> HostArray:
        """The sum over all processes, of which one has the values of a row and the others zeros."""
        if self._plan.layout.world_size == 1 or not rows.size:
            return rows
        by_device = np.zeros((len(self._setup.devices), *rows.shape), rows.dtype)
        by_device[0] = rows
        return np.asarray(self._add_program(self._staging.put(by_device)))

    @cached_property
    def _add_program(self) -> Wrapped:
        mesh = self._setup.strategy.mesh
        return jax.jit(over_devices(lambda part: lax.psum(part[0], AXIS), mesh))


def _in_a_row(specs: SumSpecs, sums: Arrays, dtype: DTypeLike, *, integer: bool) -> HostArray:
    """The integer sums of a microbatch as one row, or all other sums."""
    chosen = [name for name, spec in specs.items() if spec.integer == integer]
    parts = [np.asarray(sums[name], dtype).reshape(-1) for name in chosen]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
