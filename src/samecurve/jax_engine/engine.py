"""The JAX engine: a few compiled programs on one process's devices serve the training loop."""

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Wrapped
from numpy.typing import NDArray

from samecurve.core.config.sections import Optimizer
from samecurve.core.evaluation import EvalSum, EvalSums
from samecurve.core.events import REQUESTS, Event
from samecurve.core.feature_list import hooks_of
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    START,
    ArrayShard,
    Batch,
    Checkpoint,
    Progress,
    Round,
    Sample,
    Task,
    TrialRows,
)
from samecurve.core.split_check import lines_or_refuse
from samecurve.core.weights import digest
from samecurve.jax_engine.array_types import Arrays, Float, HostArray
from samecurve.jax_engine.batch_loss import (
    EvalLosses,
    RoundFeatures,
    accumulate_whole_batch,
    feature_shapes,
    make_round_features,
    on_host,
)
from samecurve.jax_engine.checkpoint import State, StateLayout, averaged_params
from samecurve.jax_engine.model import FlaxModel, InitialValue, open_model
from samecurve.jax_engine.sharded_calls import over_devices
from samecurve.jax_engine.split_check import whole_rows_error
from samecurve.jax_engine.staging import StagedRounds, Staging
from samecurve.jax_engine.step_metrics import QueuedMetrics
from samecurve.jax_engine.step_program import (
    Rows,
    Setup,
    make_evaluation,
    make_step,
    progress_array,
)
from samecurve.jax_engine.strategies import AXIS, STRATEGIES
from samecurve.jax_engine.trace_checks import check_loss, check_repeats

if TYPE_CHECKING:
    from samecurve.jax_engine.feature_hooks import JaxHooks


class JaxEngine:
    """Trains a task on the devices of one of the plan's processes.

    devices: jax's devices of all processes, in the plan's order.
    index: the number of this process.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        optimizer: Optimizer,
        devices: Sequence[jax.Device],
        index: int,
    ) -> None:
        self.task, self.plan = task, plan
        self.notes: list[str | Event] = []
        self._optimizer = optimizer
        self._index = index
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._local_devices = [devices[place] for place in plan.layout.devices_of(index)]
        self._strategy = STRATEGIES[plan.layout.strategy](self._mesh)
        self._dtype: Float = np.dtype(np.float64 if plan.compute.precision == "f64" else np.float32)
        self._staging = Staging(plan, self._mesh, self._dtype, len(self._local_devices))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._names: tuple[str, ...] = ()  # the means beside the loss, known once it was checked
        self._steps: dict[int, Wrapped] = {}
        self._checked = False  # whether the loss was looked at
        self._is_new = True  # whether the run began in this process
        self._first_step = 0  # of this process
        self.features: dict[str, JaxHooks] = {  # of the run, in their order
            name: hooks(self, value) for name, hooks, value in hooks_of(plan.features, "jax")
        }

    @property
    def device(self) -> jax.Device:
        """The first of this process's devices."""
        return self._local_devices[0]

    @cached_property
    def _model(self) -> FlaxModel:
        return self._open_model()[0]

    def _open_model(self) -> tuple[FlaxModel, InitialValue]:
        compute, seed = self.plan.compute, self.plan.fixed.seed
        fused = any(hooks.fuses_attention for hooks in self.features.values())
        return open_model(self.task, compute.precision, compute.recompute, seed, fused=fused)

    @cached_property
    def _setup(self) -> Setup:
        model, strategy, dtype = self._model, self._strategy, self._dtype
        features = list(self.features.values())
        averaged = any(hooks.keeps_average for hooks in features)
        layout = StateLayout(
            model, self._optimizer, strategy, dtype, self.plan, has_average=averaged
        )
        return Setup(
            task=self.task,
            plan=self.plan,
            optimizer=self._optimizer,
            model=model,
            strategy=strategy,
            layout=layout,
            dtype=dtype,
            features=features,
        )

    @property
    def _layout(self) -> StateLayout:
        return self._setup.layout

    def _step(self, num_samples: int) -> Wrapped:
        """The program of a step. A loss over the whole batch has one for each batch size."""
        key = num_samples if self.plan.whole_batch else 0
        if key not in self._steps:
            accumulate = partial(accumulate_whole_batch, num_samples=num_samples) if key else None
            self._steps[key] = make_step(self._setup, self._names, accumulate)
        return self._steps[key]

    @cached_property
    def _evaluation(self) -> Wrapped:
        return make_evaluation(self._setup)

    @cached_property
    def _round_features(self) -> Wrapped:
        return make_round_features(self._setup)

    @cached_property
    def _eval_losses(self) -> EvalLosses:
        return EvalLosses(self._setup)

    @cached_property
    def _all_finite(self) -> Wrapped:
        return jax.jit(self._layout.finite, out_shardings=self._replicated)

    @cached_property
    def _sampled_params(self) -> Wrapped:
        """A program that gives the parameters without padding: a module uses them outside a step.

        A parameter that is cut evenly stays cut, where one process has all devices; others are
        whole on every device.
        """
        shapes, whole = self._model.shapes, PartitionSpec()
        is_alone = self.plan.layout.world_size == 1
        shardings = {
            name: NamedSharding(self._mesh, self._strategy.even_spec(shape) if is_alone else whole)
            for name, shape in shapes.items()
        }

        def without_padding(params: Arrays) -> Arrays:
            return {
                name: jax.lax.slice(params[name], (0,) * len(shape), shape)
                for name, shape in shapes.items()
            }

        return jax.jit(without_padding, out_shardings=shardings)

    @cached_property
    def _empty_rows(self) -> jax.Array:
        rows: jax.Array = self._staging.put(np.zeros((len(self._local_devices), 0), self._dtype))
        return rows

    def init(self, weights: Checkpoint | None = None) -> State:
        self._model, value = self._open_model()  # the values may be a whole model: not kept
        return self._layout.init(value, weights)

    def restore(self, saved: Checkpoint, _weights: Checkpoint | None = None) -> State:
        self._is_new, self._first_step = not saved.step, saved.step
        return self._layout.restore(saved)

    def check_split(
        self, state: State, rows: TrialRows, *, as_if_split: bool = False
    ) -> Sequence[str]:
        """Check that the loss repeats, and adds up over rows if these are computed together."""
        check_repeats(self._setup, self._staging.narrow_rows(rows.pick([0])))
        error = None
        if self._takes_whole_rows and len(rows.ids) > 1:
            sums_of = partial(self._sums_of, state, rows)
            count, devices = len(rows.ids), len(self._local_devices)
            error = whole_rows_error(sums_of, count, devices, self.plan)
        return lines_or_refuse(
            error,
            repeats=True,
            is_split=self.plan.batch.is_split or as_if_split,
            allowed=self.plan.compute.allow_coupled,
        )

    @property
    def _takes_whole_rows(self) -> bool:
        """Whether a task that is not ours computes a microbatch as a whole."""
        has_leave_out = getattr(self.task, "leave_out", None) is not None
        is_theirs = has_leave_out and not getattr(self.task, "is_ours", True)
        fits = self.plan.batch.micro_batch_size > 1 and not (
            self.plan.compute.exact or self.plan.whole_batch
        )
        return is_theirs and fits

    def _sums_of(
        self, state: State, rows: TrialRows, numbers: Sequence[int], devices: int
    ) -> EvalSums:
        """The task's sums of these rows, counted once for each of `devices` of every process."""
        idle = (None,) * (len(self._local_devices) - devices)
        staged = self.stage([((rows.pick(numbers),) * devices + idle)], 1)
        return self.evaluate(state, [staged], self.plan.progress_at(rows.step))

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        return self._staging.stage(rounds, of)

    def step(
        self, state: State, batch: Batch, lr: float, requests: Sequence[int]
    ) -> tuple[State, QueuedMetrics]:
        staged: StagedRounds = batch.rounds
        if not self._checked:
            self._check_loss(staged.example)
        for hooks in self.features.values():
            hooks.before_step(state, batch)
        local = self._local_metrics(batch, requests)
        rate = np.asarray(lr, self._dtype)
        when = progress_array(batch.progress)
        rows = self._staging.trained_rows(staged.rows)
        state, values = self._step(batch.samples)(
            state, rows, self._to_all_reduce(local), rate, when
        )
        return state, QueuedMetrics(values, local, self.plan.layout.world_size, self._names)

    @property
    def setup(self) -> Setup:
        """The parts of the compiled programs."""
        return self._setup

    @property
    def means(self) -> Sequence[str]:
        """The names of the means beside the loss, known from the first step on."""
        return self._names

    @property
    def first_step(self) -> int:
        """The first step of this process."""
        return self._first_step

    def one_state(self, state: Any) -> State:
        """The state with arrays over all devices."""
        one: State = state
        return one

    def inputs_of(
        self, state: State, batch: Batch, device: int, number: int
    ) -> tuple[State, Rows, int]:
        """The state, the step's rows, and the accumulation step in which a device has one of its
        microbatches: idle ones come first.
        """
        staged: StagedRounds = batch.rounds
        rows = self._staging.trained_rows(staged.rows)
        numbers = self.plan.batch.microbatches_of(batch.num_microbatches, device)
        round_ = self.plan.batch.accumulation_steps - len(numbers) + numbers.index(number)
        return state, rows, round_

    def compiled_step(self, state: State, batch: Batch) -> Compiled:
        """The step's program, as XLA compiled it."""
        staged: StagedRounds = batch.rounds
        extra = self._to_all_reduce(self._local_metrics(batch, [0] * len(REQUESTS)))
        rate = np.asarray(0.0, self._dtype)
        when = progress_array(START)
        rows = self._staging.trained_rows(staged.rows)
        return self._step(batch.samples).lower(state, rows, extra, rate, when).compile()

    def refill(self, state: State, saved: Checkpoint) -> State:
        del state  # jax's arrays can't be written in place
        return self.restore(saved)

    def evaluate(
        self,
        state: State,
        rounds: Iterable[StagedRounds],
        progress: Progress = START,
        samples: int | None = None,
    ) -> EvalSums:
        """The task's sums over all devices.

        A round is queued once the one before it is computed: CPU devices that have many programs
        with collectives in their queues may wait for each other for ever, and a round's sign of
        life is to mean that those before it are done.
        """
        specs = self.task.eval_sums()
        params, when = averaged_params(state), progress_array(progress)
        sums: list[Arrays] = []
        features: list[RoundFeatures] = []
        for staged in rounds:
            jax.block_until_ready((sums[-1:], features[-1:]))
            sums.append(self._evaluation(params, staged.rows, when))
            if self.plan.whole_batch:
                features.append(self._round_features(params, staged.rows, when))
        totals: dict[str, EvalSum] = {}
        for name, spec in specs.items():
            dtype = np.int64 if spec.integer else np.float64
            by_round = [np.asarray(of_round[name], dtype) for of_round in sums]
            total = np.sum(by_round, axis=0) if by_round else np.zeros(spec.shape, dtype)
            totals[name] = total if spec.shape else total.item()
        if self.plan.whole_batch:
            shapes = feature_shapes(features[0].features)
            loss = self._eval_losses.total(
                [on_host(one) for one in features],
                shapes,
                when,
                samples=samples or self.plan.data.eval_samples,
            )
            totals.update({"loss.sum": loss.sum, "loss.weight": loss.weight})
        return totals

    def sample(self, state: State, step: int) -> Sequence[Sample]:
        params: Arrays = self._sampled_params(averaged_params(state))
        if all(array.is_fully_replicated for array in params.values()):
            params = {name: array.addressable_data(0) for name, array in params.items()}
        return self.task.sample(self._model.merge_for_eval(params), self.plan.fixed.seed + step)

    def gather(self, state: State) -> list[ArrayShard]:
        finite = np.asarray(self._all_finite(state)).tolist()
        return self._layout.gather(
            state, finite, process=self._index, world_size=self.plan.layout.world_size
        )

    def digests(self, state: State) -> dict[str, str]:
        """Digests of the state's arrays as this process's first device has them."""
        return {
            name: digest(np.asarray(array.addressable_data(0))).hex()
            for name, array in self.named_arrays(state)
        }

    def named_arrays(self, state: State) -> Iterator[tuple[str, jax.Array]]:
        """The arrays of a state that a checkpoint holds, by name."""
        return self._layout.named_arrays(state)

    def preflight(self, each: float = 1.0) -> float:
        """Add up numbers of all devices, with the collective that steps use."""
        add = jax.jit(over_devices(lambda own: jax.lax.psum(own.sum(), AXIS), self._mesh))
        numbers = np.full(len(self._local_devices), each, np.float32)
        return float(add(self._staging.put(numbers)))

    def peak_memory_by_device(self) -> tuple[int, ...]:
        """Peak bytes of each of this process's devices."""
        return tuple(map(self._peak_memory, self._local_devices))

    def peak_memory(self) -> int:
        return max(self.peak_memory_by_device())

    def close(self) -> None: ...

    def _local_metrics(self, batch: Batch, requests: Sequence[int]) -> NDArray[np.float64]:
        """The numbers of a step that this process reports; zeros for those of other processes."""
        wait_seconds = np.zeros(self.plan.layout.world_size)
        wait_seconds[self._index] = batch.wait_seconds
        memory_bytes = np.zeros(self.plan.layout.num_devices)
        memory_bytes[list(self.plan.layout.devices_of(self._index))] = self.peak_memory_by_device()
        return np.concatenate([np.asarray(requests, np.float64), wait_seconds, memory_bytes])

    def _to_all_reduce(self, local: NDArray[np.float64]) -> jax.Array:
        """The numbers that all processes add up in the step; empty if there is one process."""
        if self.plan.layout.world_size == 1:
            return self._empty_rows
        rows = np.zeros((len(self._local_devices), len(local)), self._dtype)
        rows[0] = local
        on_devices: jax.Array = self._staging.put(rows)
        return on_devices

    def _check_loss(self, example: Mapping[str, HostArray]) -> None:
        row = {
            name: jnp.asarray(self._staging.narrow(name, array)) for name, array in example.items()
        }
        loss = check_loss(self._setup, row)
        self._names, self._staging.loss_draws = loss.names, loss.draws
        self._layout.leave_out(loss.unused, is_new=self._is_new)
        if self._layout.left_out and self._is_new:
            from samecurve.core.unused_params import unused_line

            self.notes.append(unused_line(self._layout.left_out))
        self._checked = True

    def _peak_memory(self, device: jax.Device) -> int:
        """Peak bytes allocated on a GPU; for a CPU device its share of the process's memory."""
        if device.platform == "cpu":
            unit = 1 if sys.platform == "darwin" else 1024
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            return resident // len(self._local_devices)
        return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
