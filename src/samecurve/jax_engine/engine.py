"""One process's training on jax devices: what the loop asks for, through a few compiled programs."""

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.digest import digest
from samecurve.core.eval_sums import EvalSum, EvalSums
from samecurve.core.events import REQUESTS
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    ArrayShard,
    Batch,
    Checkpoint,
    Round,
    Sample,
    StepMetrics,
    Task,
)
from samecurve.errors import UserError
from samecurve.jax_engine.checkpoint import State, StateLayout, all_params
from samecurve.jax_engine.model import FlaxModel, InitialValue, open_model
from samecurve.jax_engine.step_program import make_evaluation, make_step
from samecurve.jax_engine.strategies import AXIS, STRATEGIES
from samecurve.jax_engine.trace_checks import check_loss


@dataclass(frozen=True)
class StagedRounds:
    """Rows of a step, or of a round of an evaluation, on their devices.

    rows: [devices, rounds, micro, ...]. real: which count. row: one of them, on the host.
    """

    rows: dict[str, jax.Array]
    real: jax.Array
    example: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class QueuedMetrics:
    """A step's figures on their way to the host; read() waits for them.

    own: what this process adds, where no other does: requests, waits, memory.
    """

    values: jax.Array
    local: NDArray[np.float64]
    world_size: int

    def read(self) -> StepMetrics:
        values = np.asarray(self.values, np.float64)
        at = time.perf_counter()
        (loss_sum, weight), (norm, finite, scale) = values[:2], values[-3:]
        shared = values[2:-3] if len(values) > 5 else self.local
        asked, waits, memory = np.split(shared, [len(REQUESTS), len(REQUESTS) + self.world_size])
        return StepMetrics(
            loss_sum / weight if weight else np.nan,
            weight,
            norm,
            bool(finite),
            {name: int(count) for name, count in zip(REQUESTS, asked, strict=True)},
            tuple(waits.tolist()),
            tuple(memory.tolist()),
            at,
            scale,
        )


class JaxEngine:
    """task: what is trained.

    devices: jax's, in the plan's order, of all processes. index: of this process.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        optimizer: Optimizer,
        devices: Sequence[jax.Device],
        index: int,
    ) -> None:
        self.task, self.plan, self._optimizer, self._index = task, plan, optimizer, index
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._local_devices = [devices[place] for place in plan.devices_of(index)]
        self._strategy = STRATEGIES[plan.strategy](self._mesh)
        self._dtype = np.dtype(np.float64 if plan.precision == "f64" else np.float32)
        self._by_device = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._real_masks: dict[bytes, Any] = {}  # a step's, by which rows are real
        self._checked = False  # whether the loss has been seen to use every parameter

    @cached_property
    def _model(self) -> FlaxModel:
        return self._open_model()[0]

    def _open_model(self) -> tuple[FlaxModel, InitialValue]:
        return open_model(self.task, self.plan.precision, self.plan.recompute, self.plan.fixed.seed)

    @cached_property
    def _layout(self) -> StateLayout:
        return StateLayout(
            self._model, self._optimizer, self._strategy, self.plan.precision == "f16", self._dtype
        )

    @cached_property
    def _step(self) -> Any:
        return make_step(
            self.task, self._model, self.plan, self._optimizer, self._strategy, self._layout
        )

    @cached_property
    def _evaluation(self) -> Any:
        return make_evaluation(
            self.task,
            self._model,
            self.task.eval_sums(),
            self._strategy,
            self._layout,
            self._dtype,
        )

    @cached_property
    def _all_finite(self) -> Any:
        return jax.jit(
            self._layout.finite, out_shardings=NamedSharding(self._mesh, PartitionSpec())
        )

    @cached_property
    def _gather_params(self) -> Any:
        """Every parameter whole on every device."""
        shapes = {name: spec.shape for name, spec in self._model.specs.items()}

        def whole(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {
                name: jax.lax.slice(params[name], (0,) * len(shape), shape)
                for name, shape in shapes.items()
            }

        return jax.jit(whole, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    @cached_property
    def _empty_rows(self) -> Any:
        return self._put(np.zeros((len(self._local_devices), 0), self._dtype))

    def init(self, weights: Checkpoint | None = None) -> State:
        self._model, value = (
            self._open_model()
        )  # the values are let go of: they may be a whole model
        return self._layout.init(value, weights)

    def restore(self, saved: Checkpoint) -> State:
        return self._layout.restore(saved)

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        """Rows side by side on their devices; what is short of plan.micro rows, or of so many
        rounds, is filled up with copies of a row: a program has one shape.
        """
        given = next(slot for found in rounds for slot in found if slot)
        row = {name: array[:1] for name, array in given.arrays.items()}
        shape = (len(self._local_devices), of, self.plan.micro_batch_size)
        real = np.zeros(shape, bool)
        rows = {
            name: np.broadcast_to(array[0], (*shape, *array.shape[1:])).copy()
            for name, array in row.items()
        }
        for number, found in enumerate(rounds, of - len(rounds)):
            for place, slot in enumerate(found):
                if slot and slot.real:
                    count = len(next(iter(slot.arrays.values())))
                    real[place, number, :count] = True
                    for name, array in slot.arrays.items():
                        rows[name][place, number, :count] = array
        return StagedRounds(
            self._put({name: self._narrow(name, array) for name, array in rows.items()}),
            self._mask(real),
            {name: self._narrow(name, array) for name, array in row.items()},
        )

    def _mask(self, real: NDArray[np.bool_]) -> Any:
        """Sent once: most steps are alike."""
        key = real.tobytes()
        if key not in self._real_masks:
            self._real_masks[key] = self._put(real)
        return self._real_masks[key]

    def step(
        self, state: State, batch: Batch, lr: float, asked: Sequence[int]
    ) -> tuple[State, QueuedMetrics]:
        staged: StagedRounds = batch.rounds
        if not self._checked:
            self._check_used(staged)
        own = self._shared_metrics(batch, asked)
        state, values = self._step(
            state, staged.rows, staged.real, self._to_all_reduce(own), np.asarray(lr, self._dtype)
        )
        return state, QueuedMetrics(values, own, self.plan.world_size)

    def compiled_step(self, state: State, batch: Batch) -> Any:
        """The step as XLA compiled it."""
        staged: StagedRounds = batch.rounds
        return self._step.lower(
            state,
            staged.rows,
            staged.real,
            self._to_all_reduce(self._shared_metrics(batch, [0] * len(REQUESTS))),
            np.asarray(0.0, self._dtype),
        ).compile()

    def evaluate(self, state: State, rounds: Iterable[StagedRounds]) -> EvalSums:
        """The task's sums over all devices."""
        specs = self.task.eval_sums()
        sums = [self._evaluation(all_params(state), staged.rows, staged.real) for staged in rounds]
        totals: dict[str, EvalSum] = {}
        for name, spec in specs.items():
            dtype = np.int64 if spec.integer else np.float64
            by_round = [np.asarray(by_name[name], dtype) for by_name in sums]
            total = np.sum(by_round, axis=0) if by_round else np.zeros(spec.shape, dtype)
            totals[name] = total if spec.shape else total.item()
        return totals

    def sample(self, state: State, step: int) -> Sequence[Sample]:
        whole = {
            name: array.addressable_data(0)
            for name, array in self._gather_params(all_params(state)).items()
        }
        return self.task.sample(self._model.merge(whole), self.plan.fixed.seed + step)

    def gather(self, state: State) -> list[ArrayShard]:
        return self._layout.gather(
            state, np.asarray(self._all_finite(state)).tolist(), self._index, self.plan.world_size
        )

    def digests(self, state: State) -> dict[str, str]:
        """Of arrays as this process's first device has them."""
        return {
            name: digest(np.asarray(array.addressable_data(0))).hex()
            for name, array in self.named_arrays(state)
        }

    def named_arrays(self, state: State) -> Iterator[tuple[str, jax.Array]]:
        """What a checkpoint would hold of a state, by name."""
        return self._layout.named_arrays(state)

    def preflight(self) -> float:
        """Through the collective that steps use."""
        add = jax.jit(
            jax.shard_map(
                lambda ones: jax.lax.psum(ones.sum(), AXIS),
                mesh=self._mesh,
                in_specs=PartitionSpec(AXIS),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )
        return float(add(self._put(np.ones(len(self._local_devices), np.float32))))

    def peak_memory_by_device(self) -> tuple[int, ...]:
        """By device of this process."""
        return tuple(map(self._memory, self._local_devices))

    def peak_memory(self) -> int:
        return max(self.peak_memory_by_device())

    def close(self) -> None: ...

    def _put(self, own: Any) -> Any:
        """Arrays (a tree of them) of which this process has its devices' rows, one a device."""
        if self.plan.world_size == 1:
            return jax.device_put(own, self._by_device)  # all at once
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(
                self._by_device, array, (self.plan.num_devices, *array.shape[1:])
            ),
            own,
        )

    def _narrow(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Numbers in the width that this run computes in. UserError: integers that don't fit."""
        if array.dtype.kind == "c":
            return array.astype(np.complex128 if self._dtype == np.float64 else np.complex64)
        if array.dtype.kind == "f":
            return array.astype(self._dtype)
        if array.dtype.itemsize < 8 or self._dtype == np.float64:
            return array
        narrow = array.astype(np.int32)  # as jax would, without a word
        if not (narrow == array).all():
            raise UserError(
                f'data "{name}" has {array.dtype} numbers beyond 32 bits, which jax has in f64'
                " only",
                "smaller numbers, floats, or --dtype f64",
                "data",
            )
        return narrow

    def _shared_metrics(self, batch: Batch, asked: Sequence[int]) -> NDArray[np.float64]:
        waits, memory = np.zeros(self.plan.world_size), np.zeros(self.plan.num_devices)
        waits[self._index] = batch.wait_seconds
        for place, device in zip(
            self.plan.devices_of(self._index), self._local_devices, strict=True
        ):
            memory[place] = self._memory(device)
        return np.concatenate([np.asarray(asked, np.float64), waits, memory])

    def _to_all_reduce(self, own: NDArray[np.float64]) -> Any:
        """What all processes add up in the step; nothing where there is one."""
        if self.plan.world_size == 1:
            return self._empty_rows
        rows = np.zeros((len(self._local_devices), len(own)), self._dtype)
        rows[0] = own
        return self._put(rows)

    def _check_used(self, staged: StagedRounds) -> None:
        check_loss(
            self.task,
            self._model,
            {name: jnp.asarray(array) for name, array in staged.example.items()},
            self._dtype,
            self._layout.trained,
        )
        self._checked = True

    def _memory(self, device: jax.Device) -> int:
        """Peak bytes: allocated on the GPU, or this device's share of what is resident in the
        process.
        """
        if device.platform == "cpu":
            return (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                * (1 if sys.platform == "darwin" else 1024)
                // len(self._local_devices)
            )
        return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
