"""train.exact under jax: one device runs the same programs as eight devices.

One program without collectives computes the gradients of a microbatch. Another adds gradients along
the step's tree (core/determinism/microbatches.py). The update is a program for one device, too.
Only the exchange spans devices: it moves values and adds them element by element.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Wrapped

from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, split_batch, subtrees
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.determinism.step_arithmetic import loss_factor
from samecurve.core.evaluation import EvalSums
from samecurve.core.protocols import (
    START,
    ArrayShard,
    Batch,
    Checkpoint,
    MicroBatch,
    Progress,
    Round,
    Sample,
)
from samecurve.jax_engine.array_types import Arrays, HostArray, PyTree, Shape
from samecurve.jax_engine.batch_loss import HostRows, positions_of
from samecurve.jax_engine.checkpoint import State, all_params, averaged_params
from samecurve.jax_engine.engine import JaxEngine
from samecurve.jax_engine.exact_batch_loss import ExactBatchLoss, StagedMicroBatch, per_device
from samecurve.jax_engine.exact_evaluation import OwnSums
from samecurve.jax_engine.exact_norm import longest_axis, piece_sums, sum_of_pieces
from samecurve.jax_engine.runtime import exact_jit
from samecurve.jax_engine.sharded_calls import over_devices
from samecurve.jax_engine.staging import rows_everywhere
from samecurve.jax_engine.step_metrics import QueuedMetrics
from samecurve.jax_engine.step_program import (
    OUTSIDE,
    GradientSums,
    LossSums,
    Rows,
    apply_update,
    microbatch_gradients,
    microbatch_metrics,
    progress_array,
    split_trained,
)
from samecurve.jax_engine.strategies import AXIS

ReplicaStates = list[State]  # whole states, one for each device of this process
ParamsOf = Callable[[State], Arrays]  # all_params, or averaged_params


class ExactEngine(JaxEngine):
    """A state is a list of whole states, one for each device of this process."""

    def init(self, weights: Checkpoint | None = None) -> Any:
        return self._per_device(super().init(weights))

    def restore(self, saved: Checkpoint, _weights: Checkpoint | None = None) -> Any:
        return self._per_device(super().restore(saved))

    def _per_device(self, state: PyTree) -> list[PyTree]:
        return per_device(state, self._local_devices)

    def stage(self, rounds: Sequence[Round], _of: int) -> Any:
        """A list of StagedMicroBatch; idle devices need no dummy here."""
        return [
            self._stage_microbatch(device, microbatch.number, self._staging.arrays_of(microbatch))
            for microbatches in rounds
            for device, microbatch in enumerate(microbatches)
            if microbatch and microbatch.real
        ]

    def _stage_microbatch(
        self, device: int, number: int, arrays: Mapping[str, HostArray]
    ) -> StagedMicroBatch:
        size = self.plan.batch.micro_batch_size
        count = len(next(iter(arrays.values())))
        filled = {}
        for name, array in arrays.items():
            copies = np.repeat(array[:1], size - count, axis=0)
            filled[name] = self._staging.narrow(name, np.concatenate([array, copies]))
        position = None
        if self.plan.whole_batch:
            position = np.full(size, OUTSIDE, np.int32)
            position[:count] = positions_of(number, count, size)
        on_device = jax.device_put(
            (filled, np.arange(size) < count, position), self._local_devices[device]
        )
        return StagedMicroBatch(device, Rows(*on_device), number)

    def step(
        self, state: Any, batch: Batch, lr: float, requests: Sequence[int]
    ) -> tuple[Any, QueuedMetrics]:
        states: ReplicaStates = state
        staged: list[StagedMicroBatch] = batch.rounds
        if not self._checked:
            self._check_loss(self._example(staged))
        for hooks in self.features.values():
            hooks.before_step(state, batch)
        staged = [replace(one, rows=self._staging.trained_rows(one.rows)) for one in staged]
        count = len(split_batch(batch.samples, self.plan.batch.micro_batch_size))
        subtree_sums = self._subtree_sums(states, staged, batch, count)
        local = self._local_metrics(batch, requests)
        totals = self._reduce(count, subtree_sums, self._to_all_reduce(local))
        squared_norms = self._squared_norms([packed for packed, _ in totals])
        rate = np.asarray(lr, self._dtype)
        updated = [
            self._update_program(replica, packed, squared_norm, extra, rate)
            for replica, (packed, extra), squared_norm in zip(
                states, totals, squared_norms, strict=True
            )
        ]
        _, values = updated[0]  # the same on every device
        metrics = QueuedMetrics(values, local, self.plan.layout.world_size, self._names)
        return [replica for replica, _ in updated], metrics

    def _subtree_sums(
        self, states: ReplicaStates, staged: Sequence[StagedMicroBatch], batch: Batch, count: int
    ) -> list[list[GradientSums]]:
        """For each local device the sums of its subtrees of the step's microbatches."""
        whole, when = self._whole_states(states, all_params), progress_array(batch.progress)
        trees = [TreeSum[GradientSums](count, self._add_program) for _ in self._local_devices]
        if self.plan.whole_batch:
            gradient_sums = self._batch_loss.gradient_sums(whole, staged, batch.samples, when)
        else:
            gradient_sums = [self._gradients(whole, microbatch, when) for microbatch in staged]
        for microbatch, sums in zip(staged, gradient_sums, strict=True):
            trees[microbatch.local_device].give((0, microbatch.number), sums)
        return [[sums for _, sums in tree.held] for tree in trees]

    def _whole_states(self, states: ReplicaStates, _params_of: ParamsOf) -> ReplicaStates:
        """States whose parameters, as these are asked for, are whole on each device."""
        return states

    def inputs_of(
        self, state: Any, batch: Batch, _device: int, number: int
    ) -> tuple[State, Rows, int]:
        staged: list[StagedMicroBatch] = batch.rounds
        like = self._staging.trained_rows((staged or [self._dummy()])[0].rows)
        own = {
            one.local_device: self._staging.trained_rows(one.rows)
            for one in staged
            if one.number == number
        }
        rows = rows_everywhere(own, like, self._local_devices, self._staging.by_device)
        return self.one_state(state), rows, 0

    def _dummy(self) -> StagedMicroBatch:
        """A microbatch of the form that all have."""
        keys = RowKeys(self.plan.fixed.seed, 0, 0, np.arange(1))
        row = MicroBatch(self.task.train_data()[np.arange(1)], keys=keys)
        return self._stage_microbatch(0, 0, self._staging.arrays_of(row))

    def _example(self, staged: Sequence[StagedMicroBatch]) -> Mapping[str, HostArray]:
        """A row whose shapes are those of the data; from the source if the step brought no row."""
        arrays: Mapping[str, Any] = self.task.train_data()[np.arange(1)]
        if staged:
            arrays = staged[0].rows.arrays
        return {
            name: self._staging.narrow(name, np.asarray(array[:1]))
            for name, array in arrays.items()
        }

    def _gradients(
        self, states: ReplicaStates, microbatch: StagedMicroBatch, when: HostArray
    ) -> GradientSums:
        replica = states[microbatch.local_device]
        sums: GradientSums = self._gradient_program(
            all_params(replica), microbatch.rows, replica["scale"], when
        )
        return sums

    @cached_property
    def _batch_loss(self) -> ExactBatchLoss:
        return ExactBatchLoss(
            setup=self._setup,
            by_device=self._staging.by_device,
            local_devices=self._local_devices,
            example=self._example([]),
            names=self._names,
        )

    @cached_property
    def _gradient_program(self) -> Wrapped:
        """(parameters, rows, scale, when) -> GradientSums of a microbatch."""

        def program(whole: Arrays, rows: Rows, scale: jax.Array, when: jax.Array) -> GradientSums:
            params, merge = split_trained(self._setup, whole)
            factor = loss_factor(scale, self.plan.nominal_weight)
            sums_of = LossSums(self.task, self._names, when)
            return microbatch_gradients(sums_of, merge, params, rows, factor)

        return exact_jit(program)

    @cached_property
    def _add_program(self) -> Wrapped:
        return exact_jit(
            lambda left, right: jax.tree.map(jnp.add, left, right), donate_argnums=(0,)
        )

    @cached_property
    def _update_program(self) -> Wrapped:
        """(state, packed GradientSums of the step, squared norm, sums over processes, lr) ->
        (state, metrics).
        """

        def program(
            state: State,
            packed: jax.Array,
            squared_norm: jax.Array,
            extra: jax.Array,
            lr: jax.Array,
        ) -> tuple[State, jax.Array]:
            sums = self._unpack(packed)
            state, update_metrics = apply_update(self._setup, state, sums, squared_norm, lr)
            return state, jnp.concatenate([sums.totals, extra, update_metrics])

        return exact_jit(program, donate_argnums=(0,))

    def _squared_norms(self, packed: Sequence[jax.Array]) -> list[jax.Array]:
        """The squared norm of the step's gradient, on each local device."""
        return [self._norm_program(self._squares_program(values)) for values in packed]

    @cached_property
    def _squares_program(self) -> Wrapped:
        """Apart from the sums of squares: see exact_norm.py."""
        return exact_jit(jnp.square)

    @cached_property
    def _norm_program(self) -> Wrapped:
        """(squares of packed GradientSums) -> the sum of those of the gradient."""

        def program(squares: jax.Array) -> jax.Array:
            gradients = self._unpack(squares).gradients
            axes = {name: longest_axis(one.shape) for name, one in gradients.items() if one.ndim}
            return sum_of_pieces(piece_sums(gradients, axes).values())

        return exact_jit(program)

    @cached_property
    def _pack_program(self) -> Wrapped:
        """Pack the sums of one device's subtrees into [1, subtrees, *_packed_shape]."""
        return exact_jit(
            lambda subtree_sums: jnp.stack([self._pack(sums) for sums in subtree_sums])[None]
        )

    def _pack(self, sums: GradientSums) -> jax.Array:
        gradients = [sums.gradients[name].ravel() for name in self._layout.trained]
        return jnp.concatenate([*gradients, sums.totals])

    @cached_property
    def _packed_shape(self) -> Shape:
        return (sum(map(self._num_scalars, self._layout.trained)) + 2 + 2 * len(self._names),)

    def _unpack(self, packed: jax.Array) -> GradientSums:
        gradients, begin = {}, 0
        for name in self._layout.trained:
            end = begin + self._num_scalars(name)
            gradients[name] = packed[begin:end].reshape(self._model.specs[name].shape)
            begin = end
        return GradientSums(gradients, packed[begin:])

    def _num_scalars(self, name: str) -> int:
        return int(np.prod(self._model.specs[name].shape, dtype=np.int64))

    def _reduce(
        self, count: int, subtree_sums: Sequence[list[GradientSums]], extra: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The packed sum over all microbatches and the sum of extra, for each local device.

        count: the number of microbatches in the step.
        """
        num_devices = self.plan.layout.num_devices
        most = max(
            len(subtrees(microbatches_of(count, place, num_devices), count))
            for place in range(num_devices)
        )
        rows = []
        for device, sums in enumerate(subtree_sums):
            if sums:
                copies = sums[-1:] * (most - len(sums))  # one shape for all devices
                rows.append(self._pack_program(sums + copies))
            else:
                rows.append(self._empty_pack(device, most))
        shape = (num_devices, *rows[0].shape[1:])
        packed = jax.make_array_from_single_device_arrays(shape, self._staging.by_device, rows)
        return self._per_device(self._exchange_program(count)(packed, extra))

    def _empty_pack(self, device: int, most: int) -> jax.Array:
        zeros = np.zeros((1, most, *self._packed_shape), self._dtype)
        packed: jax.Array = jax.device_put(zeros, self._local_devices[device])
        return packed

    @cached_property
    def _exchange_program(self) -> Callable[[int], Wrapped]:
        """Compile, for a number of microbatches, the exchange of subtree sums between devices.

        (packed [devices, subtrees, values], extra [devices, n]) -> the sums of both along the tree,
        on every device. Each device adds up one part of the values; then all devices gather them.
        """
        num_devices = self.plan.layout.num_devices

        def program(count: int, packed: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
            (local,) = packed
            num_subtrees, num_values = local.shape
            part = -(-num_values // num_devices)
            padded = jnp.pad(local, ((0, 0), (0, part * num_devices - num_values)))
            parts = padded.reshape(num_subtrees, num_devices, part)
            of_all_devices = lax.all_to_all(
                parts, AXIS, split_axis=1, concat_axis=0, tiled=False
            )  # [devices, subtrees, part]
            tree: TreeSum[jax.Array] = TreeSum(count, jnp.add)
            for place in range(num_devices):
                nodes = subtrees(microbatches_of(count, place, num_devices), count)
                for number, node in enumerate(nodes):
                    tree.give(node, of_all_devices[place, number])
            gathered = lax.all_gather(tree.total(), AXIS, tiled=True)
            return lax.slice(gathered, (0,), (num_values,)), lax.psum(extra, AXIS)[0]

        return cache(lambda count: exact_jit(over_devices(partial(program, count), self._mesh)))

    def evaluate(
        self,
        state: Any,
        rounds: Iterable[Any],
        progress: Progress = START,
        samples: int | None = None,
    ) -> EvalSums:
        """The task's sums: counts add up as integers, the others along the microbatches' tree."""
        states = self._whole_states(state, averaged_params)
        samples = samples or self.plan.data.eval_samples
        num_microbatches = len(split_batch(samples, self.plan.batch.micro_batch_size))
        own = OwnSums(self.task.eval_sums(), num_microbatches, self._dtype)
        queued, when = [], progress_array(progress)
        features: list[HostRows] = []
        for staged in rounds:
            for microbatch in staged:
                params = averaged_params(states[microbatch.local_device])
                sums = self._metrics_program(params, microbatch.rows, when)
                queued.append((microbatch.number, sums))
                if self.plan.whole_batch:
                    replica = states[microbatch.local_device]
                    features.append(self._batch_loss.features(replica, microbatch.rows, when))
        for number, sums in queued:
            own.give(number, sums)
        layout = self.plan.layout
        totals = own.totals(layout.world_size, self._index, self._sum_over_processes)
        if self.plan.whole_batch:
            shapes = self._batch_loss.feature_shapes
            sums = self._eval_losses.total(
                features, shapes, when, self._sum_over_processes, samples=samples
            )
            totals.update({"loss.sum": sums.sum, "loss.weight": sums.weight})
        return totals

    @cached_property
    def _metrics_program(self) -> Wrapped:
        """(parameters, rows, when) -> a microbatch's sums by name."""
        return exact_jit(partial(microbatch_metrics, self._setup))

    def _sum_over_processes(self, rows: HostArray) -> HostArray:
        """The rows of all processes. One process filled each row; the others add zeros."""
        if self.plan.layout.world_size == 1:
            return rows
        by_device = np.zeros((len(self._local_devices), *rows.shape), rows.dtype)
        by_device[0] = rows
        add = jax.jit(over_devices(lambda part: lax.psum(part[0], AXIS), self._mesh))
        return np.asarray(add(self._staging.put(by_device)))

    def sample(self, state: Any, step: int) -> Sequence[Sample]:
        states = self._whole_states(state, averaged_params)
        module = self._model.merge_for_eval(averaged_params(states[0]))
        return self.task.sample(module, self.plan.fixed.seed + step)

    @cached_property
    def _all_finite(self) -> Wrapped:
        return jax.jit(self._layout.finite)

    def gather(self, state: Any) -> list[ArrayShard]:
        return super().gather(state[0])

    def digests(self, state: Any) -> dict[str, str]:
        return super().digests(state[0])

    def one_state(self, state: ReplicaStates) -> State:
        """One state whose arrays have a copy on each device."""

        def joined(*copies: jax.Array) -> jax.Array:
            shape = copies[0].shape
            return jax.make_array_from_single_device_arrays(shape, self._replicated, copies)

        one: State = jax.tree.map(joined, *state)
        return one
