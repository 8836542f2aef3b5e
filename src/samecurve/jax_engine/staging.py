"""Puts rows on the devices: in the run's number width, in one shape.

The feed's thread stages rows while steps run, so nothing here may read an engine's state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from samecurve.core.determinism.sample_keys import HELD_OUT
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch, Round
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Float, HostArray, PyTree
from samecurve.jax_engine.batch_loss import positions_of
from samecurve.jax_engine.sample_numbers import KEYS, keyed_arrays
from samecurve.jax_engine.step_program import OUTSIDE, Rows
from samecurve.jax_engine.strategies import AXIS


@dataclass(frozen=True)
class StagedRounds:
    """The rows of a step, or of a round of an evaluation, on their devices."""

    rows: Rows  # [devices, accumulation steps, microbatch, ...]
    example: Mapping[str, HostArray]  # one real row, on the host, as the data has it


class Staging:
    """Puts host arrays on this process's devices.

    dtype: the type of the run's floating-point numbers
    num_local: the number of this process's devices
    loss_draws: whether the loss takes numbers from its rows' keys; True until that is known. Keys
        that nobody asks for cost a tenth of a short step.
    """

    loss_draws = True

    def __init__(self, plan: Plan, mesh: Mesh, dtype: Float, num_local: int) -> None:
        self._plan, self._dtype, self._num_local = plan, dtype, num_local
        self.by_device = NamedSharding(mesh, PartitionSpec(AXIS))
        self._sent: dict[tuple[object, ...], tuple[jax.Array, jax.Array | None]] = {}

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        """Put the rounds of a step on their devices.

        A program has one shape, so short microbatches and missing rounds (the first ones) are
        filled up with copies of a row. of: the number of rounds in the program's shape.
        """
        parts = [
            _Part(device, index, microbatch, self.arrays_of(microbatch))
            for device in range(self._num_local)
            for index, microbatches in enumerate(rounds, of - len(rounds))
            if (microbatch := microbatches[device])
        ]
        shape = (self._num_local, of, self._plan.batch.micro_batch_size)
        # keys may have been found to be unused while the parts were listed
        names = [name for name in parts[0].arrays if all(name in part.arrays for part in parts)]
        rows = {name: self.narrow(name, _joined(parts, name, shape)) for name in names}
        real, position = self._masks(parts, shape)
        example = {name: array[:1] for name, array in parts[0].arrays.items()}
        return StagedRounds(Rows(self.put(rows), real, position), example)

    def _masks(
        self, parts: "Sequence[_Part]", shape: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array | None]:
        """Which rows count, and their positions in the step where the loss needs them; on the
        devices. Both are sent once for all steps of one form.
        """
        needs_position = self._plan.whole_batch
        form = (shape, *(part.form(numbered=needs_position) for part in parts))
        if form not in self._sent:
            real, position = np.zeros(shape, bool), np.full(shape, OUTSIDE, np.int32)
            for part in parts:
                rows = part.device, part.index, slice(part.count)
                real[rows] = True
                position[rows] = positions_of(part.microbatch.number, part.count, shape[-1])
            self._sent[form] = self.put(real), self.put(position) if needs_position else None
        return self._sent[form]

    def arrays_of(self, microbatch: MicroBatch) -> Mapping[str, HostArray]:
        """The arrays of a microbatch, with its rows' keys unless they are known to be unused."""
        keys = microbatch.keys
        if keys is not None and keys.epoch != HELD_OUT and not self.loss_draws:
            return microbatch.arrays
        return keyed_arrays(microbatch)

    def trained_rows(self, rows: Rows) -> Rows:
        """The rows that the loss is given: what was staged before loss_draws was known has keys."""
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


def rows_everywhere(
    own: Mapping[int, Rows],
    like: Rows,
    devices: Sequence[jax.Device],
    sharding: NamedSharding,
) -> Rows:
    """Rows [devices, 1, microbatch, ...] over all devices, of single microbatches.

    own: by the number among `devices`, those of this process; others are zeros, in the form of
        `like`
    """

    def part(number: int, array: jax.Array, device: jax.Device) -> jax.Array:
        if number not in own:
            zeros: jax.Array = jax.device_put(np.zeros(array.shape, array.dtype), device)
            return zeros[None, None]
        return array[None, None]

    parts = [
        jax.tree.map(partial(part, number, device=device), own.get(number, like))
        for number, device in enumerate(devices)
    ]

    def join(*of_devices: jax.Array) -> jax.Array:
        shape = (sharding.mesh.size, *of_devices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(of_devices))

    joined: Rows = jax.tree.map(join, *parts)
    return joined
