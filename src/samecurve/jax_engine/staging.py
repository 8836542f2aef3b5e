"""Puts rows on the devices: in the run's number width, in one shape.

The feed's thread stages rows while steps run, so nothing here may read an engine's state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        # masks and positions of a step's rows; most steps have the same ones
        self._sent: dict[tuple[str, bytes], jax.Array] = {}

    def stage(self, rounds: Sequence[Round], of: int) -> StagedRounds:
        """Put the rounds of a step on their devices.

        A program has one shape, so short microbatches and missing rounds (the first ones) are
        filled up with copies of a row. of: the number of rounds in the program's shape.
        """
        some_microbatch = next(microbatch for one in rounds for microbatch in one if microbatch)
        example = {name: array[:1] for name, array in self.arrays_of(some_microbatch).items()}
        shape = (self._num_local, of, self._plan.batch.micro_batch_size)
        real, position = np.zeros(shape, bool), np.full(shape, OUTSIDE, np.int32)
        rows = {
            name: np.broadcast_to(array[0], (*shape, *array.shape[1:])).copy()
            for name, array in example.items()
        }
        for number, microbatches in enumerate(rounds, of - len(rounds)):
            for device, microbatch in enumerate(microbatches):
                if microbatch and microbatch.real:
                    count = len(next(iter(microbatch.arrays.values())))
                    real[device, number, :count] = True
                    position[device, number, :count] = positions_of(
                        microbatch.number, count, self._plan.batch.micro_batch_size
                    )
                    for name, array in self.arrays_of(microbatch).items():
                        rows[name][device, number, :count] = array
        on_devices = self.put({name: self.narrow(name, array) for name, array in rows.items()})
        return StagedRounds(
            Rows(
                on_devices,
                self._send_once(real),
                self._send_once(position) if self._plan.compute.whole_batch else None,
            ),
            example,
        )

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

    def _send_once(self, array: HostArray) -> jax.Array:
        """Put an array on the devices, once for all steps that have an equal one."""
        key = (array.dtype.str, array.tobytes())
        if key not in self._sent:
            self._sent[key] = self.put(array)
        return self._sent[key]

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
