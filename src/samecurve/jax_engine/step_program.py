"""The compiled programs: one optimizer step, and one round of an evaluation, over all devices.

Some rows only fill up a compiled shape; sum and weight leave them out. If the task has
leave_out(rows, real) it leaves them out itself, and a microbatch is computed as a whole. Else rows
are mapped one by one (vmap): this works for any loss and costs layout copies (measured 10 % of a
step of models/tiny.yaml on two CPU devices). Gradients add up over accumulation steps on each
device, then once over devices, together with sums and weights. One division follows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped
from jax.typing import ArrayLike, DTypeLike

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.step_arithmetic import (
    Clip,
    NumberFunctions,
    loss_factor,
    next_loss_scale,
    scale_gradient,
)
from samecurve.core.evaluation import check_shape
from samecurve.core.named_means import check_names
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Progress, Task
from samecurve.jax_engine.array_types import Arrays, Float, HostArray, PyTree
from samecurve.jax_engine.checkpoint import State, StateLayout, all_params
from samecurve.jax_engine.model import FlaxModel
from samecurve.jax_engine.sample_numbers import KEYS, with_numbers
from samecurve.jax_engine.sharded_calls import shard_map
from samecurve.jax_engine.strategies import AXIS, Strategy

_NUMBERS = NumberFunctions(divide=jnp.divide, maximum=jnp.maximum, is_finite=jnp.isfinite)
_BY_DEVICE = PartitionSpec(AXIS)
OUTSIDE = 2**31 - 1  # the position of a row that only fills up a shape
Merge = Callable[[Arrays], nnx.Module]  # trained parameters -> the module


class Rows(NamedTuple):
    """Samples of a microbatch; leading axes stand for several microbatches, or for devices."""

    arrays: Arrays
    real: jax.Array  # which rows count; the others fill up a shape
    # positions of the rows in the step, or OUTSIDE; None: the loss does not need them
    position: jax.Array | None = None


class GradientSums(NamedTuple):
    """Gradients and totals summed over one microbatch, or over several."""

    gradients: Arrays  # gradients of the loss sum, scaled
    totals: jax.Array  # [loss sum, weight, then sum and weight of each other mean]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of which the compiled programs of a run are made."""

    task: Task
    plan: Plan
    optimizer: Optimizer  # the config's section
    model: FlaxModel
    strategy: Strategy
    layout: StateLayout
    dtype: Float
    features: Sequence[Any] = ()  # the hooks of the run's features (feature_hooks.py)


def make_step(
    setup: Setup, names: Sequence[str], accumulate: "Accumulate | None" = None
) -> Wrapped:
    """Compile a step: (state, rows, extra, lr, when) -> (state, metrics).

    names: the means beside the loss.
    accumulate: how one device's gradients are summed; None: microbatch by microbatch.
    state: its arrays can't be used afterwards.
    rows: [devices, accumulation steps, microbatch, ...].
    extra: [devices, n], added up over devices.
    when: [step, epoch], from progress_array().
    metrics: loss sum, weight, sum and weight of each other mean, extra, gradient norm before
        clipping, whether the update was made, f16's scale.
    """
    accumulate, strategy, layout = accumulate or _accumulate, setup.strategy, setup.layout

    def step(
        state: State, rows: Rows, extra: jax.Array, lr: jax.Array, when: jax.Array
    ) -> tuple[State, jax.Array]:
        whole = strategy.gather_params(all_params(state), setup.model.shapes)
        params, merge = split_trained(setup, whole)
        factor = loss_factor(state["scale"], setup.plan.nominal_weight)
        sums_of = LossSums(setup.task, names, when)
        local = accumulate(sums_of, merge, params, first_of(rows), factor)
        gradients, (totals, extra_sums) = strategy.reduce(local.gradients, (local.totals, extra[0]))
        sums, squared_norm = GradientSums(gradients, totals), strategy.squared_norm(gradients)
        state, update_metrics = apply_update(setup, state, sums, squared_norm, lr)
        return state, jnp.concatenate([totals, extra_sums, update_metrics])

    mapped = shard_map(
        step,
        mesh=strategy.mesh,
        in_specs=(layout.specs, _BY_DEVICE, _BY_DEVICE, PartitionSpec(), PartitionSpec()),
        out_specs=(layout.specs, PartitionSpec()),
    )
    return jax.jit(mapped, donate_argnums=0)


class LossSums(NamedTuple):
    """Sum and weight of a task's loss, then of each mean beside it."""

    task: Task
    names: Sequence[str]  # the means beside the loss
    when: jax.Array  # [step, epoch]

    def __call__(self, module: nnx.Module, arrays: Arrays) -> list[ArrayLike]:
        losses = self.task.losses(module, arrays, Progress(*self.when))
        check_names(losses, self.names)
        return [number for name in ("loss", *self.names) for number in losses[name]]


# Sums the gradients of one device's rows [accumulation steps, microbatch, ...]; the last argument
# is the factor of the loss sum.
Accumulate = Callable[[LossSums, Merge, Arrays, Rows, jax.Array], GradientSums]


def progress_array(progress: Progress) -> HostArray:
    """Progress as the programs take it: [step, epoch].

    jax keeps the 64 bits in f64 runs, so that a share of all steps is computed in f64 there.
    """
    return np.array([progress.step, progress.epoch], np.int64)


def first_of(rows: Rows) -> Rows:
    """Drop the first axis, which has one entry."""
    first: Rows = jax.tree.map(lambda array: array[0], rows)
    return first


def split_trained(setup: Setup, whole: Arrays) -> tuple[Arrays, Merge]:
    """The trained parameters, and a function that makes the module from values of them."""
    params = {name: whole[name] for name in setup.layout.trained}
    return params, lambda params: setup.model.merge({**whole, **params})


def apply_update(
    setup: Setup, state: State, sums: GradientSums, squared_norm: jax.Array, lr: jax.Array
) -> tuple[State, jax.Array]:
    """Update the parameters from a step's summed gradients, unless a gradient is not finite.

    Returns the state and [norm before clipping, whether the update was made, f16's scale].
    """
    plan, layout = setup.plan, setup.layout
    params, scale = state["params"], state["scale"]
    scaling = scale_gradient(
        loss_sum=sums.totals[0],
        weight=sums.totals[1],
        summed_norm=jnp.sqrt(squared_norm),
        loss_scale=scale,
        nominal_weight=plan.nominal_weight,
        clip=Clip(setup.optimizer.clip, plan.fixed.clip_epsilon),
        numbers=_NUMBERS,
    )
    finite = scaling.finite
    clipped = {
        name: gradient * scaling.factor.astype(gradient.dtype)
        for name, gradient in sums.gradients.items()
    }
    # a parameter of zeros has no decay; its gradient and moments are zeros, and so is its direction
    decayed = params | {name: jnp.zeros_like(params[name]) for name in layout.left_out}
    directions, moments = layout.transform.update(clipped, state["moments"], decayed)
    moved = {}
    for name, values in params.items():
        lr_scale = layout.trained[name].lr_scale
        rate = lr if lr_scale == 1 else lr * lr_scale
        moved[name] = values - rate.astype(values.dtype) * directions[name]
    for feature in setup.features:
        moved = feature.after_update(moved)
    average = state["average"]
    for feature in setup.features:
        average = feature.average_after(average, moved)
    params, average, moments = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (moved, average, moments),
        (params, state["average"], state["moments"]),
    )
    updated = State({**state, "params": params, "average": average, "moments": moments})
    if plan.compute.precision == "f16":
        scaled = next_loss_scale(scale, state["streak"], finite, jnp.where)
        updated["scale"], updated["streak"] = scaled
    norm = scaling.grad_norm
    return updated, jnp.stack([norm, finite.astype(norm.dtype), scale])


def _accumulate(
    sums_of: LossSums, merge: Merge, params: Arrays, rows: Rows, factor: jax.Array
) -> GradientSums:
    """Add up the gradient sums of one device's accumulation steps.

    rows: [accumulation steps, microbatch, ...]. factor: multiplies the loss sum.
    """
    if rows.real.shape[0] == 1:
        return microbatch_gradients(sums_of, merge, params, first_of(rows), factor)

    def add(sums: GradientSums, microbatch: Rows) -> tuple[GradientSums, None]:
        more = microbatch_gradients(sums_of, merge, params, microbatch, factor)
        return jax.tree.map(jnp.add, sums, more), None

    totals = jnp.zeros(2 + 2 * len(sums_of.names), factor.dtype)
    zeros = GradientSums(jax.tree.map(jnp.zeros_like, params), totals)
    sums, _ = lax.scan(add, zeros, rows)
    return sums


def microbatch_gradients(
    sums_of: LossSums, merge: Merge, params: Arrays, rows: Rows, factor: jax.Array
) -> GradientSums:
    """The gradient sums of one microbatch. factor: multiplies the loss sum."""
    dtypes = [factor.dtype] * (2 + 2 * len(sums_of.names))

    def scaled_loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        sums = _masked_sums(
            sums_of.task, lambda arrays: sums_of(merge(params), arrays), rows, dtypes
        )
        totals = jnp.stack(sums)
        return totals[0] * factor, totals

    (_, totals), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    return GradientSums(gradients, totals)


def microbatch_metrics(setup: Setup, params: Arrays, rows: Rows, when: jax.Array) -> Arrays:
    """The task's sums of one microbatch of an evaluation, counts as integers."""
    task, specs, dtype = setup.task, setup.task.eval_sums(), setup.dtype
    integers = jnp.int64 if dtype == np.float64 else jnp.int32

    def values(arrays: Arrays) -> list[ArrayLike]:
        module = setup.model.merge_for_eval(params)
        by_name: Mapping[str, ArrayLike] = task.evaluate(module, arrays, Progress(*when))
        for name, spec in specs.items():
            check_shape(name, jnp.shape(by_name[name]), spec)
        return [by_name[name] for name in specs]

    dtypes = [integers if spec.integer else dtype for spec in specs.values()]
    return dict(zip(specs, _masked_sums(task, values, rows, dtypes), strict=True))


def _masked_sums(
    task: Task,
    values: Callable[[Arrays], Iterable[ArrayLike]],
    rows: Rows,
    dtypes: Sequence[DTypeLike],
) -> list[jax.Array]:
    """Sum values over the rows that count, each in its dtype.

    The other rows are copies of real rows: one is nan only if a real row, and so the step, is nan.
    """
    leave_out: Callable[[Arrays, jax.Array], Arrays] | None = getattr(task, "leave_out", None)
    if leave_out:
        by_name = with_numbers(values, without_fillers(leave_out, rows))
        of_rows = map(jnp.asarray, by_name)
        return [value.astype(dtype) for value, dtype in zip(of_rows, dtypes, strict=True)]

    def of_one_row(row: Arrays) -> list[jax.Array]:
        batch_of_one = {name: array[None] for name, array in row.items()}
        return [jnp.asarray(value) for value in with_numbers(values, batch_of_one)]

    sums = []
    for by_row, dtype in zip(jax.vmap(of_one_row)(rows.arrays), dtypes, strict=True):
        real = rows.real.reshape(-1, *[1] * (by_row.ndim - 1))
        sums.append(jnp.where(real, by_row.astype(dtype), 0).sum(0, dtype=dtype))
    return sums


def without_fillers(leave_out: Callable[[Arrays, jax.Array], Arrays], rows: Rows) -> Arrays:
    """The rows of a microbatch that the task leaves in, and the keys of all rows."""
    keyed = {KEYS: rows.arrays[KEYS]} if KEYS in rows.arrays else {}
    arrays = {name: array for name, array in rows.arrays.items() if name != KEYS}
    return {**leave_out(arrays, rows.real), **keyed}


def make_evaluation(setup: Setup) -> Wrapped:
    """Compile a round of an evaluation: round_program() -> the task's sums over all devices."""
    return round_program(
        setup,
        lambda params, rows, when: lax.psum(microbatch_metrics(setup, params, rows, when), AXIS),
    )


def round_program(setup: Setup, compute: Callable[[Arrays, Rows, jax.Array], PyTree]) -> Wrapped:
    """Compile (params, rows [devices, 1, microbatch, ...], when) -> the same on every device.

    compute: (whole parameters, a device's microbatch, [step, epoch]) -> the result.
    """

    def of_device(params: Arrays, rows: Rows, when: jax.Array) -> PyTree:
        whole = setup.strategy.gather_params(params, setup.model.shapes)
        return compute(whole, first_of(first_of(rows)), when)

    return jax.jit(
        shard_map(
            of_device,
            mesh=setup.strategy.mesh,
            in_specs=(all_params(setup.layout.specs), _BY_DEVICE, PartitionSpec()),
            out_specs=PartitionSpec(),
        )
    )
