"""Steps whose gradients are added by XLA's collectives (reducer `collective`).

A step is one program over all devices: it scans a device's microbatches and adds them in order,
then adds over devices once, together with sums and weights. One division follows.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Compiled, Wrapped

from samecurve.jax_engine.array_types import Arrays
from samecurve.jax_engine.batch_loss import accumulate_whole_batch
from samecurve.jax_engine.checkpoint import State, all_params
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.step_program import (
    GradientSums,
    Reduced,
    Rows,
    Setup,
    StepInputs,
    Steps,
    apply_update,
    first_of,
    microbatch_gradients,
)
from samecurve.jax_engine.strategies import AXIS

_BY_DEVICE, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


class CollectiveSteps(Steps[State, GradientSums, Reduced]):
    """A state is arrays over all devices; inside the step's program, those of one device."""

    def run(self, state: State, inputs: StepInputs, num_samples: int) -> tuple[State, jax.Array]:
        result: tuple[State, jax.Array] = self._program(num_samples)(state, inputs)
        return result

    def compiled_step(self, state: State, inputs: StepInputs, num_samples: int) -> Compiled | None:
        return self._program(num_samples).lower(state, inputs).compile()

    def _program(self, num_samples: int) -> Wrapped:
        """The program of a step. A loss over the whole batch has one for each batch size."""
        return self._program_of(num_samples if self.setup.plan.sees_whole_batch else 0)

    @cached_property
    def _program_of(self) -> Callable[[int], Wrapped]:
        specs = self.setup.layout.specs
        inputs: Any = (_BY_DEVICE, _BY_DEVICE, _WHOLE, _WHOLE)

        def compiled(num_samples: int) -> Wrapped:
            mapped = shard_map(
                partial(self.step, num_samples=num_samples),
                mesh=self.setup.strategy.mesh,
                in_specs=(specs, StepInputs(*inputs)),
                out_specs=(specs, _WHOLE),
            )
            return self.setup.compiled(mapped, donate=(0,))

        return cache(compiled)

    # Inside the program:

    def gradient_sums(self, state: State, inputs: StepInputs, num_samples: int) -> GradientSums:
        setup, rows = self.setup, first_of(inputs.rows)
        whole = setup.strategy.gather_params(all_params(state), setup.model.shapes)
        add_rounds: Callable[..., GradientSums] = _add_in_order
        if setup.plan.sees_whole_batch:
            add_rounds = partial(accumulate_whole_batch, num_samples=num_samples)
        return add_rounds(setup, whole, rows, state["scale"], inputs.when)

    def reduce(self, sums: GradientSums, extra: jax.Array, _num_samples: int) -> Reduced:
        strategy = self.setup.strategy
        gradients, others = strategy.reduce(sums.gradients, (sums.totals, extra[0]))
        totals, extra_sums = others
        squared_norm = strategy.squared_norm(gradients)
        return Reduced(GradientSums(gradients, totals), squared_norm, extra_sums)

    def update(self, state: State, reduced: Reduced, lr: Any) -> tuple[State, jax.Array]:
        return apply_update(self.setup, state, reduced, lr)

    # Around steps:

    def place(self, state: State) -> State:
        return state

    def one_state(self, state: State) -> State:
        return state

    def rows_again(self, rows: Rows, _number: int, index: int) -> tuple[Rows, int]:
        return rows, index


def _add_in_order(
    setup: Setup, whole: Arrays, rows: Rows, scale: jax.Array, when: Any
) -> GradientSums:
    """Add up the gradient sums of one device's accumulation steps.

    rows: [accumulation steps, microbatch, ...]
    """
    if rows.real.shape[0] == 1:
        return microbatch_gradients(setup, whole, first_of(rows), scale, when)

    def add(sums: GradientSums, microbatch: Rows) -> tuple[GradientSums, None]:
        more = microbatch_gradients(setup, whole, microbatch, scale, when)
        return jax.tree.map(jnp.add, sums, more), None

    gradients = {name: jnp.zeros_like(whole[name]) for name in setup.layout.trained}
    zeros = GradientSums(gradients, jnp.zeros(setup.num_totals, scale.dtype))
    sums, _ = lax.scan(add, zeros, rows)
    return sums
