"""Puts rows on the devices: in the run's number width, in one shape.

The feed's thread stages rows while steps run, so nothing here may read an engine's state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from samecurve.core.determinism.sample_keys import HELD_OUT
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch, Round
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Float, HostArray, PyTree
from samecurve.jax_engine.sample_numbers import KEYS, keyed_arrays
from samecurve.jax_engine.step_program import OUTSIDE, Rows
from samecurve.jax_engine.strategies import AXIS


@dataclass(frozen=True)
class StagedRounds:
    """The rows of a step, or of a round of an evaluation, on their devices."""

    # a list of StagedMicroBatch; where the plan's reducer is `collective`, for training: Rows
    # [devices, accumulation steps, microbatch, ...]
    rows: Any
    example: Mapping[str, HostArray]  # one real row, on the host, as the data has it


@dataclass(frozen=True)
class StagedMicroBatch:
    """A microbatch on its device, filled up to plan.batch.micro_batch_size rows."""

    local_device: int
    rows: Rows
    number: int | None  # which microbatch of the step; None: a copy of a row, to be dropped


class Staging:
    """Puts host arrays on this process's devices.

    dtype: the type of the run's floating-point numbers
    devices: those of this process
    loss_draws: whether the loss takes numbers from its rows' keys; True until that is known. Keys
        that nobody asks for cost a tenth of a short step.
    """

    loss_draws = True

    def __init__(self, plan: Plan, mesh: Mesh, dtype: Float, devices: Sequence[jax.Device]) -> None:
        self._plan, self._dtype, self._devices = plan, dtype, devices
        self._micro_batch_size = plan.batch.micro_batch_size
        self.by_device = NamedSharding(mesh, PartitionSpec(AXIS))
        self._sent: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        """Put the rounds of a step on their devices. of: the number of rounds in a whole step.

        Of single microbatches a copy of a row is staged only if the process has no other.
        """
        parts = self._parts(rounds, of)
        example = {name: array[:1] for name, array in parts[0].arrays.items()}
        keys = parts[0].microbatch.keys
        is_held_out = keys is not None and keys.epoch == HELD_OUT
        if is_held_out or self._plan.compute.reducer == "tree":
            needed = [part for part in parts if part.microbatch.real] or parts[:1]
            return StagedRounds(list(map(self._one_by_one, needed)), example)
        return StagedRounds(self._together(parts, of), example)

    def one_by_one(self, rounds: Sequence[Round]) -> list[StagedMicroBatch]:
        """Put microbatches on their devices, each as arrays of its own."""
        return list(map(self._one_by_one, self._parts(rounds, len(rounds))))

    def _parts(self, rounds: Sequence[Round], of: int) -> "list[_Part]":
        return [
            _Part(device, index, microbatch, self.arrays_of(microbatch))
            for index, microbatches in enumerate(rounds, of - len(rounds))
            for device, microbatch in enumerate(microbatches)
            if microbatch
        ]

    def _one_by_one(self, part: "_Part") -> StagedMicroBatch:
        """Put a microbatch on its device."""
        alone, shape = [replace(part, device=0, index=0)], (1, 1, self._micro_batch_size)
        arrays = self._filled(alone, shape)
        rows: Any = jax.tree.map(
            lambda array: array[0, 0], Rows(arrays, *self._masks(alone, shape))
        )
        on_device = jax.device_put(rows, self._devices[part.device])
        return StagedMicroBatch(part.device, on_device, part.number)

    def _together(self, parts: "Sequence[_Part]", of: int) -> Rows:
        """Put the microbatches of all devices on them: [devices, of, microbatch, ...]. What is
        known of their rows is sent once for all steps of one form.
        """
        parts = sorted(parts, key=lambda part: (part.device, part.index))
        shape = (len(self._devices), of, self._micro_batch_size)
        needs_position = self._plan.sees_whole_batch
        form = (shape, *(part.form(numbered=needs_position) for part in parts))
        if form not in self._sent:
            self._sent[form] = self.put(self._masks(parts, shape))
        return Rows(self.put(self._filled(parts, shape)), *self._sent[form])

    def _filled(self, parts: "Sequence[_Part]", shape: tuple[int, ...]) -> Any:
        """The arrays of these microbatches, [devices, accumulation steps, microbatch, ...].

        A program has one shape, so short microbatches and missing rounds (the first ones) are
        filled up with copies of a row.
        """
        # keys may have been found to be unused while the parts were listed
        names = [name for name in parts[0].arrays if all(name in part.arrays for part in parts)]
        return {name: self.narrow(name, _joined(parts, name, shape)) for name in names}

    def _masks(self, parts: "Sequence[_Part]", shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Which rows count, and their positions in the step where the loss needs them."""
        real, position = np.zeros(shape, bool), np.full(shape, OUTSIDE, np.int32)
        for part in parts:
            rows = part.device, part.index, slice(part.count)
            real[rows] = True
            position[rows] = part.microbatch.number * shape[-1] + np.arange(part.count)
        return real, position if self._plan.sees_whole_batch else None

    def arrays_of(self, microbatch: MicroBatch) -> Mapping[str, HostArray]:
        """The arrays of a microbatch, with its rows' keys unless they are known to be unused."""
        keys = microbatch.keys
        if keys is not None and keys.epoch != HELD_OUT and not self.loss_draws:
            return microbatch.arrays
        return keyed_arrays(microbatch)

    def trained_rows(self, staged: StagedRounds) -> Any:
        """The rows that the loss is given: what was staged before loss_draws was known has keys."""
        if isinstance(staged.rows, Rows):
            return self._without_unused_keys(staged.rows)
        return [replace(one, rows=self._without_unused_keys(one.rows)) for one in staged.rows]

    def _without_unused_keys(self, rows: Rows) -> Rows:
        if self.loss_draws or KEYS not in rows.arrays:
            return rows
        arrays = {name: array for name, array in rows.arrays.items() if name != KEYS}
        return rows._replace(arrays=arrays)

    def put(self, tree: PyTree) -> PyTree:
        """Put arrays on all devices; this process has one row for each of its devices."""
        if self._plan.layout.world_size == 1:
            return jax.device_put(tree, self.by_device)  # one call for all arrays
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(
                self.by_device, array, (self._plan.layout.num_devices, *array.shape[1:])
            ),
            tree,
        )

    def narrow(self, name: str, array: HostArray) -> HostArray:
        """Convert numbers to the width of the run. UserError: an integer does not fit."""
        if array.dtype.kind == "c":
            return array.astype(np.complex128 if self._dtype == np.float64 else np.complex64)
        if array.dtype.kind == "f":
            return array.astype(self._dtype)
        if array.dtype.itemsize < 8 or self._dtype == np.float64:
            return array
        narrow = array.astype(np.int32)  # jax would do the same, without a check
        if not (narrow == array).all():
            raise UserError(
                f'data "{name}" has {array.dtype} numbers beyond 32 bits, which jax supports in f64'
                " only",
                "smaller numbers, floats, or --dtype f64",
                "data",
            )
        return narrow

    def narrow_rows(self, microbatch: MicroBatch) -> Mapping[str, HostArray]:
        arrays = keyed_arrays(microbatch)
        return {name: self.narrow(name, array) for name, array in arrays.items()}


@dataclass(frozen=True)
class _Part:
    """A device's microbatch in one of its accumulation steps."""

    device: int
    index: int  # of the accumulation step
    microbatch: MicroBatch
    arrays: Mapping[str, HostArray]

    @property
    def count(self) -> int:
        """How many of its rows count."""
        if not self.microbatch.real:
            return 0
        return len(next(iter(self.microbatch.arrays.values())))

    @property
    def number(self) -> int | None:
        """Which microbatch of the step it is; None: a copy of a row, to be dropped."""
        return self.microbatch.number if self.microbatch.real else None

    def form(self, *, numbered: bool) -> tuple[int, ...]:
        """What masks follow from. numbered: positions do, too"""
        return self.device, self.index, self.count, self.microbatch.number if numbered else 0


def _joined(parts: Sequence[_Part], name: str, shape: tuple[int, ...]) -> HostArray:
    """An array of all rows, of this shape and the row's own, filled up with copies of a row."""
    arrays = [part.arrays[name] for part in parts]
    whole = (*shape, *arrays[0].shape[1:])
    if sum(part.count for part in parts) == math.prod(shape):  # nearly all steps
        return np.concatenate(arrays).reshape(whole)
    rows = np.broadcast_to(arrays[0][0], whole).copy()
    for part, array in zip(parts, arrays, strict=True):
        rows[part.device, part.index, : part.count] = array[: part.count]
    return rows
