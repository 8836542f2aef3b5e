"""The compiled programs: one optimizer step, and one round of an evaluation, each a shard_map over
all devices.

Rows which only fill a compiled shape are left out of sum and weight: by the task, where it has
leave_out(rows, real), and a microbatch is computed as a whole; else rows are mapped one by one
(vmap), which holds for any loss and costs layout copies (measured 10 % of a step of
models/tiny.yaml on two CPU devices). Gradients add up over accumulation steps on each device, and
over devices once, where sums and weights are added too. One division follows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped
from jax.typing import ArrayLike, DTypeLike

from samecurve.core.config.param_groups import ParamRule
from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.step_arithmetic import (
    Clip,
    NumberFunctions,
    loss_factor,
    next_loss_scale,
    scale_gradient,
)
from samecurve.core.evaluation.eval_sums import check_shape
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
Merge = Callable[[Arrays], nnx.Module]  # what is trained -> the module


class Rows(NamedTuple):
    """Samples: of a microbatch, or with leading axes of several, or of all devices."""

    arrays: Arrays
    real: jax.Array  # which of them count; the others fill up a shape
    # which of the step's samples they are, or OUTSIDE; None: nobody asks
    position: jax.Array | None = None


class GradientSums(NamedTuple):
    """Gradients and totals summed over one microbatch, or over several."""

    gradients: Arrays  # of the loss sum, scaled
    totals: jax.Array  # [loss sum, weight, the same of each other mean]


def make_step(
    *,
    task: Task,
    names: Sequence[str],
    model: FlaxModel,
    plan: Plan,
    optimizer: Optimizer,
    strategy: Strategy,
    layout: StateLayout,
    accumulate: "Accumulate | None" = None,
) -> Wrapped:
    """(state, rows, extra, lr, when) -> (state, metrics).

    state: used up.
    rows: [devices, accumulation steps, microbatch, ...].
    extra: [devices, n], added up over devices.
    when: [step, epoch], as progress_array() has it.
    names: of the means beside the loss.
    accumulate: None: the losses of the microbatches, added.
    metrics: loss sum, weight, the same of each other mean, extra, gradient norm before clipping,
        whether the update was made, f16's scale.
    """
    shapes = {name: spec.shape for name, spec in model.specs.items()}
    accumulate = accumulate or _accumulate

    def step(
        state: State, rows: Rows, extra: jax.Array, lr: jax.Array, when: jax.Array
    ) -> tuple[State, jax.Array]:
        whole = strategy.gather_params(all_params(state), shapes)
        params, merge = split_trained(model, whole, layout.trained)
        factor = loss_factor(state["scale"], plan.nominal_weight)
        local = accumulate(LossSums(task, names, when), merge, params, first_of(rows), factor)
        gradients, (totals, extra_sums) = strategy.reduce(local.gradients, (local.totals, extra[0]))
        state, update_metrics = apply_update(
            state,
            GradientSums(gradients, totals),
            strategy.squared_norm(gradients),
            lr,
            plan=plan,
            optimizer=optimizer,
            layout=layout,
        )
        return state, jnp.concatenate([totals, extra_sums, update_metrics])

    specs = layout.specs
    mapped = shard_map(
        step,
        mesh=strategy.mesh,
        in_specs=(specs, _BY_DEVICE, _BY_DEVICE, PartitionSpec(), PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
    )
    return jax.jit(mapped, donate_argnums=0)


class LossSums(NamedTuple):
    """Sum and weight of a task's loss, and of the means beside it in this order, at [step, epoch]
    of a run.
    """

    task: Task
    names: Sequence[str]
    when: jax.Array

    def __call__(self, module: nnx.Module, arrays: Arrays) -> list[ArrayLike]:
        losses = self.task.losses(module, arrays, Progress(*self.when))
        check_names(losses, self.names)
        return [number for name in ("loss", *self.names) for number in losses[name]]


# Over one device's accumulation steps, of rows [accumulation steps, microbatch, ...]; the last
# argument is the factor of the loss sum.
Accumulate = Callable[[LossSums, Merge, Arrays, Rows, jax.Array], GradientSums]


def progress_array(progress: Progress) -> HostArray:
    """Progress as the programs take it: [step, epoch], in 64 bits where the run has them, so that
    a share of the steps is computed as precisely as everything else.
    """
    return np.array([progress.step, progress.epoch], np.int64)


def first_of(rows: Rows) -> Rows:
    """Without the first axis, of which only one is there."""
    first: Rows = jax.tree.map(lambda array: array[0], rows)
    return first


def split_trained(
    model: FlaxModel, whole: Arrays, trained: Collection[str]
) -> tuple[Arrays, Merge]:
    """Split off the parameters that are trained; the function makes the module of them."""
    params = {name: whole[name] for name in trained}
    return params, lambda params: model.merge({**whole, **params})


def apply_update(
    state: State,
    sums: GradientSums,
    squared_norm: jax.Array,
    lr: jax.Array,
    *,
    plan: Plan,
    optimizer: Optimizer,
    layout: StateLayout,
) -> tuple[State, jax.Array]:
    """Update the parameters from a step's summed gradients, unless one of these is not finite.

    squared_norm: of all gradients. Returns the state, and [norm before clipping, whether the update
    was made, f16's scale].
    """
    params, scale = state["params"], state["scale"]
    loss_sum, weight = sums.totals[0], sums.totals[1]
    scaling = scale_gradient(
        loss_sum=loss_sum,
        weight=weight,
        summed_norm=jnp.sqrt(squared_norm),
        loss_scale=scale,
        nominal_weight=plan.nominal_weight,
        clip=Clip(optimizer.clip, plan.fixed.clip_epsilon),
        numbers=_NUMBERS,
    )
    finite: jax.Array = scaling.finite
    clipped = {
        name: gradient * scaling.factor.astype(gradient.dtype)
        for name, gradient in sums.gradients.items()
    }
    directions, moments = layout.transform.update(clipped, state["moments"], params)
    moved = {}
    for name, values in params.items():
        rate = _scaled_lr(lr, layout.trained[name]).astype(values.dtype)
        moved[name] = values - rate * directions[name]

    average = {
        name: values + (1 - plan.compute.ema) * (moved[name] - values)
        for name, values in state["average"].items()
    }

    def if_finite(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)

    next_scale, streak = _next_scale(plan, state, finite)
    updated = State(
        params=if_finite(moved, params),
        frozen=state["frozen"],
        average=if_finite(average, state["average"]),
        moments=if_finite(moments, state["moments"]),
        scale=next_scale,
        streak=streak,
    )
    norm: jax.Array = scaling.grad_norm
    return updated, jnp.stack([norm, finite.astype(norm.dtype), scale])


def _scaled_lr(lr: jax.Array, rule: ParamRule) -> jax.Array:
    return lr if rule.lr_scale == 1 else lr * rule.lr_scale


def _next_scale(plan: Plan, state: State, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f16's loss scale, and the finite steps since it changed; both unchanged otherwise."""
    if plan.compute.precision != "f16":
        return state["scale"], state["streak"]
    return next_loss_scale(state["scale"], state["streak"], finite, jnp.where)


def _accumulate(
    sums_of: LossSums, merge: Merge, params: Arrays, rows: Rows, factor: jax.Array
) -> GradientSums:
    """Add up the gradient sums of one device's accumulation steps.

    rows: [accumulation steps, microbatch, ...]. factor: of the loss sum.
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
    """factor: of the loss sum."""
    dtypes = [factor.dtype] * (2 + 2 * len(sums_of.names))

    def scaled_loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        sums = _masked_sums(
            sums_of.task, lambda arrays: sums_of(merge(params), arrays), rows, dtypes
        )
        totals = jnp.stack(sums)
        return totals[0] * factor, totals

    (_, totals), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    return GradientSums(gradients, totals)


def microbatch_metrics(
    task: Task, model: FlaxModel, params: Arrays, rows: Rows, dtype: Float, *, when: jax.Array
) -> Arrays:
    """The task's sums of one microbatch of an evaluation, counts as integers.

    when: [step, epoch].
    """
    specs = task.eval_sums()
    integers = jnp.int64 if dtype == np.float64 else jnp.int32

    def values(arrays: Arrays) -> list[ArrayLike]:
        by_name: Mapping[str, ArrayLike] = task.evaluate(
            model.merge(params), arrays, Progress(*when)
        )
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
    """Values added over the rows that count, each in its dtype.

    The others are copies of real ones, so only what spoils the step anyway could make those a nan.
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
    """A microbatch as a whole, its rows' keys with it."""
    keyed = {KEYS: rows.arrays[KEYS]} if KEYS in rows.arrays else {}
    arrays = {name: array for name, array in rows.arrays.items() if name != KEYS}
    return {**leave_out(arrays, rows.real), **keyed}


def make_evaluation(
    *, task: Task, model: FlaxModel, strategy: Strategy, layout: StateLayout, dtype: Float
) -> Wrapped:
    """(params, rows, when) -> the task's sums over all devices, by name.

    rows: [devices, 1, microbatch, ...]. when: [step, epoch].
    """
    shapes = {name: spec.shape for name, spec in model.specs.items()}

    def evaluate(params: Arrays, rows: Rows, when: jax.Array) -> Arrays:
        whole = strategy.gather_params(params, shapes)
        local = microbatch_metrics(task, model, whole, first_of(first_of(rows)), dtype, when=when)
        totals: Arrays = lax.psum(local, AXIS)
        return totals

    return jax.jit(
        shard_map(
            evaluate,
            mesh=strategy.mesh,
            in_specs=(all_params(layout.specs), _BY_DEVICE, PartitionSpec()),
            out_specs=PartitionSpec(),
        )
    )
