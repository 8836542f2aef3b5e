"""The guard under jax.

Rows of a microbatch that a task computes as a whole (leave_out) can influence each other, so they
are tried in parts before the first step. Rows that are mapped one by one can't.

train.sentinel: before a step every device computes the gradient of one of the step's microbatches,
and the hashes must be equal. A device that is alone computes it twice. A step is one compiled
program, which gives no gradient of a single microbatch, and another program may round in another
way. So one program of its own computes the gradient on all devices, from the weights and rows of
the step: it checks the devices, and not the very numbers that are trained with.
"""

import math
import socket
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from samecurve.core.determinism.data_order import by_length
from samecurve.core.evaluation import EvalSums
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Batch, TrialRows
from samecurve.errors import UserError
from samecurve.features.guard import Choice, SentinelRule, choose, is_due
from samecurve.features.guard.additivity import (
    SURE,
    Format,
    Trial,
    compare_parts,
    lines_or_refuse,
    rounding_line,
    two_parts,
)
from samecurve.features.guard.verdict import (
    CheckedGradient,
    Row,
    alike,
    hosts_of_devices,
    judge,
)
from samecurve.jax_engine.array_types import Arrays
from samecurve.jax_engine.bit_sums import bit_sums
from samecurve.jax_engine.checkpoint import State, all_params
from samecurve.jax_engine.evaluation import RealAndIdle
from samecurve.jax_engine.feature_hooks import JaxHooks
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.step_program import (
    Rows,
    first_of,
    microbatch_gradients,
    progress_array,
)
from samecurve.jax_engine.strategies import AXIS

_HOST_NAME = 64  # bytes
_FORMATS: dict[str, Format] = {"f64": "f64", "f32": "f32"}  # by precision; all others: narrow


class Hooks(JaxHooks):
    """Tries a loss that takes rows together before the first step, and checks some steps."""

    value: SentinelRule | None

    @property
    def _rule(self) -> SentinelRule:
        assert self.value is not None
        return self.value

    @cached_property
    def arrays(self) -> list[str]:
        """The names of the arrays that are hashed."""
        return list(self.engine.setup.layout.trained)

    def begin_training(self, state: Any, rows: TrialRows, *, is_split: bool) -> None:
        """UserError: the loss does not add up over rows that are computed together."""
        if self.engine.in_float32 and is_split:
            self.engine.notes.append(rounding_line(self.engine.in_float32))
        if not self.engine.takes_whole_rows or len(rows.ids) < 2:
            return
        sums_of = partial(self.engine.trial_sums, state, rows)
        error = whole_rows_error(sums_of, len(rows.ids), self.engine.plan)
        allowed = self.engine.plan.compute.allow_coupled
        lines = lines_or_refuse(error, repeats=True, is_split=is_split, allowed=allowed)
        self.engine.notes += lines

    def before_step(self, state: Any, batch: Batch) -> None:
        """Compare gradients of one microbatch, in steps in which the sentinel does so."""
        if self.value is None or not is_due(self.value, batch.step, self.engine.first_step):
            return
        choice = choose(self.engine.plan, batch.step, batch.num_microbatches)
        inputs = self.engine.inputs_of(state, batch, choice.device, choice.number)
        self.engine.notes.append(self._check(choice, batch, *inputs))

    def _check(self, choice: Choice, batch: Batch, state: State, rows: Rows, round_: int) -> Event:
        """Compute and compare; all processes call it together. Returns a line for the journal.

        rows: [devices, accumulation steps, microbatch, ...]; round_: which of these steps

        RunError: devices differ, and train.on_sentinel is stop.
        """
        place = np.array([choice.device, round_], np.int32)
        params, when = all_params(state), progress_array(batch.progress)
        times: list[list[Row]] = [[] for _ in self.engine.plan.layout.devices]
        groups, finding = alike(self.engine.plan), None
        least = 2 if any(len(group) == 1 for group in groups) else 1
        while len(times[0]) < least or (finding and len(times[0]) < 3):
            halves = np.asarray(self.hashes(params, state["scale"], rows, when, place))
            table = np.ascontiguousarray(halves).view(np.int64)[..., 0]
            for of_device, row in zip(times, table, strict=True):
                of_device.append(row)
            finding = judge(times, groups)
        gradient = CheckedGradient(
            plan=self.engine.plan,
            rule=self._rule,
            step=batch.step,
            choice=choice,
            count=batch.num_microbatches,
            ids=self._ids(batch, choice) if finding else (),
            names=self.arrays,
            hosts=self._hosts() if finding else (),
        )
        counts = [len(of_device) for of_device in times]
        return gradient.report(finding, counts) if finding else gradient.passed(sum(counts))

    @cached_property
    def hashes(self) -> Wrapped:
        """Compile: (parameters, scale, rows, when, [device, accumulation step]) -> [devices,
        arrays, 2], the two halves of each hash.
        """
        setup, strategy = self.engine.setup, self.engine.setup.strategy

        def program(
            shards: Arrays, scale: jax.Array, rows: Rows, when: jax.Array, place: jax.Array
        ) -> jax.Array:
            device, round_ = place

            def of_place(array: jax.Array) -> jax.Array:
                own = lax.dynamic_index_in_dim(array, round_, keepdims=False)
                everyone = lax.all_gather(own, AXIS)
                chosen: jax.Array = lax.dynamic_index_in_dim(everyone, device, keepdims=False)
                return chosen

            microbatch: Rows = jax.tree.map(of_place, first_of(rows))
            whole = strategy.gather_params(shards, setup.model.shapes)
            gradients, _ = microbatch_gradients(setup, whole, microbatch, scale, when)
            own = jnp.stack([bit_sums(gradients[name]) for name in self.arrays])
            gathered: jax.Array = lax.all_gather(own, AXIS)
            return gathered

        whole, by_device = PartitionSpec(), PartitionSpec(AXIS)
        mapped = shard_map(
            program,
            mesh=strategy.mesh,
            in_specs=(all_params(setup.layout.specs), whole, by_device, whole, whole),
            out_specs=whole,
        )
        return setup.compiled(mapped)

    def _ids(self, batch: Batch, choice: Choice) -> list[int]:
        """The samples of a microbatch, as the feed has them."""
        size = self.engine.plan.batch.micro_batch_size
        ids = self.engine.plan.order.ids(range(batch.step, batch.step + 1))[0]
        lengths = self.engine.setup.task.train_data().lengths
        if lengths is not None:
            ids = by_length(ids, lengths[ids], size)
        samples: list[int] = ids[choice.number * size :][:size].tolist()
        return samples

    def _hosts(self) -> list[str]:
        if self.engine.plan.layout.world_size == 1:
            return []
        from jax.experimental.multihost_utils import process_allgather

        name = socket.gethostname().encode()[:_HOST_NAME].ljust(_HOST_NAME)
        names = np.asarray(process_allgather(np.frombuffer(name, np.uint8)))
        by_process = [bytes(row).decode(errors="replace").strip() for row in names]
        return hosts_of_devices(self.engine.plan, by_process)


def whole_rows_error(
    sums_of: Callable[[Sequence[int]], RealAndIdle], count: int, plan: Plan
) -> UserError | None:
    """The error of a loss or a metric that does not add up over rows; None: all add up.

    sums_of: numbers of rows -> the task's sums
    count: the number of rows
    """
    rows = range(count)
    parts = two_parts(rows)
    (whole, idle), *of_parts = map(sums_of, (rows, *parts))
    tolerance = SURE[_FORMATS.get(plan.compute.precision, "narrow")]
    names = [name.removesuffix(".sum") for name in whole if name.endswith(".sum")]
    for name in names:
        of_each = zip((whole, *(real for real, _ in of_parts)), (rows, *parts), strict=True)
        trials = [_trial(sums, name, len(numbers)) for sums, numbers in of_each]
        present = [trial for trial in trials if trial]
        finding = compare_parts(present[0], present[1:], tolerance) if all(trials) else None
        if finding:
            from samecurve.features.guard.split_errors import Evidence, explain

            what = "the loss" if name == "loss" else f'the metric "{name}"'
            return explain(finding, Evidence(what=what, loss_at="task"), rounded=tolerance)
    for name, total in idle.items():
        if isinstance(total, float) and not math.isfinite(total) and math.isfinite(whole[name]):
            return UserError(
                f"{name} is {total} where a device has no row that counts",
                "return 0 there, as sum and as weight: if leave_out(rows, real) leaves no row, a"
                " division by the number of rows is 0/0 (jnp.maximum(count, 1))",
                "task",
            )
    return None


def _trial(sums: EvalSums, name: str, samples: int) -> Trial | None:
    """The sum and weight of a metric; None for a table of counts."""
    total, weight = sums[f"{name}.sum"], sums[f"{name}.weight"]
    if not isinstance(total, int | float) or not isinstance(weight, int | float):
        return None
    return Trial(samples, total, weight)
