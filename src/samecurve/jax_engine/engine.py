"""The JAX engine: a few compiled programs on one process's devices serve the training loop."""

import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Wrapped
from numpy.typing import NDArray

from samecurve.core.config.sections import Optimizer
from samecurve.core.evaluation import EvalSums
from samecurve.core.events import REQUESTS, Event
from samecurve.core.feature_list import brought_by, hooks_of
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
from samecurve.core.weights import digest
from samecurve.jax_engine.array_types import Arrays, Float, HostArray, Shape
from samecurve.jax_engine.checkpoint import State, StateLayout, averaged_params
from samecurve.jax_engine.evaluation import Evaluation, RealAndIdle
from samecurve.jax_engine.model import FlaxModel, InitialValue, open_model
from samecurve.jax_engine.sharded_calls import over_devices
from samecurve.jax_engine.staging import StagedRounds, Staging
from samecurve.jax_engine.step_metrics import QueuedMetrics
from samecurve.jax_engine.step_program import Rows, Setup, StepInputs, Steps, progress_array
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
        self.in_float32 = ""
        self._optimizer = optimizer
        self._index = index
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._local_devices = [devices[place] for place in plan.layout.devices_of(index)]
        self._strategy = STRATEGIES[plan.layout.strategy](
            self._mesh, cuts_longest=plan.compute.reducer == "tree"
        )
        self._dtype: Float = np.dtype(np.float64 if plan.compute.precision == "f64" else np.float32)
        self._staging = Staging(plan, self._mesh, self._dtype, self._local_devices)
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
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
        prepare = [hooks.prepare for hooks in self.features.values()]
        return open_model(self.task, compute.precision, seed, prepare)

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
            devices=self._local_devices,
        )

    @property
    def _layout(self) -> StateLayout:
        return self._setup.layout

    @cached_property
    def _steps(self) -> Steps[Any, Any, Any]:
        """Steps with the plan's reducer, which alone knows what a state is."""
        if self.plan.compute.reducer == "tree":
            from samecurve.jax_engine.tree_steps import TreeSteps

            return TreeSteps(self._setup)
        from samecurve.jax_engine.collective_steps import CollectiveSteps

        return CollectiveSteps(self._setup)

    @cached_property
    def _evaluation(self) -> Evaluation:
        return Evaluation(self._setup, self._staging, self._index)

    @cached_property
    def _all_finite(self) -> Wrapped:
        return jax.jit(self._layout.finite, out_shardings=self._replicated)

    @cached_property
    def _sampled_params(self) -> Wrapped:
        """A program that gives the parameters without padding: a module uses them outside a step.

        A parameter that is cut evenly stays cut, where one process has all devices and the reducer
        is no tree: a module that is cut rounds in another way. Others are whole on every device.
        """
        shapes, whole = self._model.shapes, PartitionSpec()
        stay_cut = self.plan.layout.world_size == 1 and self.plan.compute.reducer != "tree"
        shardings = {
            name: NamedSharding(self._mesh, self._strategy.even_spec(shape) if stay_cut else whole)
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

    def init(self, weights: Checkpoint | None = None) -> Any:
        self._model, value = self._open_model()  # the values may be a whole model: not kept
        return self._steps.place(self._layout.init(value, weights))

    def restore(self, saved: Checkpoint, _weights: Checkpoint | None = None) -> Any:
        self._is_new, self._first_step = not saved.step, saved.step
        return self._steps.place(self._layout.restore(saved))

    def begin_training(self, state: Any, rows: TrialRows, *, as_if_split: bool = False) -> None:
        row = self._staging.narrow_rows(rows.pick([0]))
        self.in_float32 = check_repeats(self._setup, row)
        found = {name: None for name in brought_by("training") if name not in self.features}
        for name, hooks, value in hooks_of(found, "jax"):
            self.features[name] = hooks(self, value)
        is_split = self.plan.batch.is_split or as_if_split
        for hooks in self.features.values():
            hooks.begin_training(state, rows, is_split=is_split)

    def trial_sums(self, state: Any, rows: TrialRows, numbers: Sequence[int]) -> RealAndIdle:
        """The task's sums of these rows, and those of rows that all only fill up a shape."""
        return self._evaluation.trial_sums(self._steps.one_state(state), rows, numbers)

    @property
    def takes_whole_rows(self) -> bool:
        """Whether a task that is not ours computes a microbatch as a whole."""
        has_leave_out = getattr(self.task, "leave_out", None) is not None
        is_theirs = has_leave_out and not getattr(self.task, "is_ours", True)
        fits = self.plan.batch.micro_batch_size > 1 and not (
            self.plan.compute.fixed_microbatches or self.plan.sees_whole_batch
        )
        return is_theirs and fits

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        return self._staging.stage(rounds, of)

    def step(
        self, state: Any, batch: Batch, lr: float, requests: Sequence[int]
    ) -> tuple[Any, QueuedMetrics]:
        staged: StagedRounds = batch.rounds
        if not self._checked:
            self._check_loss(staged.example)
        for hooks in self.features.values():
            hooks.before_step(state, batch)
        local = self._local_metrics(batch, requests)
        inputs = self._inputs(batch, local, lr)
        state, values = self._steps.run(state, inputs, batch.samples)
        return state, QueuedMetrics(values, local, self.plan.layout.world_size, self._setup.means)

    @property
    def setup(self) -> Setup:
        """The parts of the compiled programs."""
        return self._setup

    @property
    def first_step(self) -> int:
        """The first step of this process."""
        return self._first_step

    def inputs_of(
        self, state: Any, batch: Batch, device: int, number: int
    ) -> tuple[State, Rows, int]:
        """The state, rows of the step, and the place among them where a device has one of its
        microbatches: idle ones come first.
        """
        numbers = self.plan.batch.microbatches_of(batch.num_microbatches, device)
        round_ = self.plan.batch.accumulation_steps - len(numbers) + numbers.index(number)
        trained = self._staging.trained_rows(batch.rounds)
        return self._steps.one_state(state), *self._steps.rows_again(trained, number, round_)

    def _inputs(self, batch: Batch, local: NDArray[np.float64], lr: float) -> StepInputs:
        return StepInputs(
            self._staging.trained_rows(batch.rounds),
            self._to_all_reduce(local),
            np.asarray(lr, self._dtype),
            progress_array(batch.progress),
        )

    def compiled_step(self, state: Any, batch: Batch) -> Compiled | None:
        """The step's program, as XLA compiled it; None: there are several."""
        local = self._local_metrics(batch, [0] * len(REQUESTS))
        return self._steps.compiled_step(state, self._inputs(batch, local, 0.0), batch.samples)

    def refill(self, state: Any, saved: Checkpoint) -> Any:
        del state  # jax's arrays can't be written in place
        return self.restore(saved)

    def evaluate(
        self,
        state: Any,
        rounds: Iterable[StagedRounds],
        progress: Progress = START,
        samples: int | None = None,
    ) -> EvalSums:
        """The task's sums over all devices."""
        one_state, samples = self._steps.one_state(state), samples or self.plan.eval_samples
        return self._evaluation.sums(one_state, rounds, progress, samples)

    def sample(self, state: Any, step: int) -> Sequence[Sample]:
        params: Arrays = self._sampled_params(averaged_params(self._steps.one_state(state)))
        if all(array.is_fully_replicated for array in params.values()):
            params = {name: array.addressable_data(0) for name, array in params.items()}
        return self.task.sample(self._model.merge_for_eval(params), self.plan.fixed.seed + step)

    def kept(self) -> dict[str, Any]:
        """Nothing: a task's code runs once for each program, and what it changes is no state."""
        return {}

    def gather(self, state: Any) -> list[ArrayShard]:
        one_state = self._steps.one_state(state)
        finite = np.asarray(self._all_finite(one_state)).tolist()
        return self._layout.gather(
            one_state, finite, process=self._index, world_size=self.plan.layout.world_size
        )

    def digests(self, state: Any) -> dict[str, str]:
        """Digests of whole arrays, which are put together one at a time."""
        shapes = self._layout.shapes
        return {
            name: digest(np.asarray(self._whole_array(shapes[name])(array))).hex()
            for name, array in self.named_arrays(state)
        }

    @cached_property
    def _whole_array(self) -> Callable[[Shape], Wrapped]:
        """Compile, for a shape: (array that may be cut) -> the array on every device."""

        def compiled(shape: Shape) -> Wrapped:
            def without_padding(array: jax.Array) -> jax.Array:
                return jax.lax.slice(array, (0,) * len(shape), shape)

            return jax.jit(without_padding, out_shardings=self._replicated)

        return cache(compiled)

    def named_arrays(self, state: Any) -> Iterator[tuple[str, jax.Array]]:
        """The arrays of a state that a checkpoint holds, by name."""
        return self._layout.named_arrays(self._steps.one_state(state))

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
        self._setup.means, self._staging.loss_draws = loss.names, loss.draws
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
