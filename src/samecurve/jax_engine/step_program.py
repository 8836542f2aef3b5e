"""The compiled programs: one optimizer step, and one round of an evaluation, each a shard_map over
all devices.

Rows which only fill a compiled shape are left out of sum and weight: by the task, where it has
leave_out(rows, real), and a slot is computed as a whole; else rows are mapped one by one (vmap),
which holds for any loss and costs layout copies (measured 10 % of a step of models/tiny.yaml on two
CPU devices). Gradients add up over rounds on each device, and over devices once, where sums and
weights are added too. One division follows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from samecurve.core.config.param_groups import ParamRule
from samecurve.core.config.sections import Optimizer
from samecurve.core.eval_sums import SumSpecs, check_shape
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import Task
from samecurve.jax_engine.checkpoint import State, StateLayout, all_params
from samecurve.jax_engine.model import FlaxModel
from samecurve.jax_engine.strategies import AXIS, Strategy

_GROW_AFTER = 2000  # finite steps before f16's scale is doubled, as torch.amp.GradScaler has it
_BY_DEVICE = PartitionSpec(AXIS)
Arrays = dict[str, jax.Array]
Merge = Callable[[Arrays], Any]  # what is trained -> the module


def make_step(
    task: Task,
    model: FlaxModel,
    plan: Plan,
    fields: Optimizer,
    strategy: Strategy,
    layout: StateLayout,
) -> Callable[..., tuple[State, jax.Array]]:
    """(state, rows, real, extra, lr) -> (state, figures).

    rows: arrays [devices, rounds, micro, ...]; real: which rows count; extra: [devices, n], added
    up.

    figures: loss sum, weight, extra, gradient norm before clipping, whether the update was made,
    f16's scale. The state given is used up.
    """
    shapes = {name: spec.shape for name, spec in model.specs.items()}

    def step(
        state: State, rows: Arrays, real: jax.Array, extra: jax.Array, lr: jax.Array
    ) -> tuple[State, jax.Array]:
        params, merge = split_trained(
            model, strategy.gather_params(all_params(state), shapes), layout.trained
        )
        gradients, sums = _accumulate(
            task,
            merge,
            params,
            {name: array[0] for name, array in rows.items()},
            real[0],
            state["scale"] / plan.nominal_weight,
        )
        gradients, (sums, extra) = strategy.reduce(gradients, (sums, extra[0]))
        state, figures = apply_update(
            plan, fields, layout, state, gradients, sums, strategy.squared_norm(gradients), lr
        )
        return state, jnp.concatenate([sums, extra, figures])

    specs = layout.specs
    mapped = jax.shard_map(
        step,
        mesh=strategy.mesh,
        in_specs=(specs, _BY_DEVICE, _BY_DEVICE, _BY_DEVICE, PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


def split_trained(
    model: FlaxModel, whole: Arrays, trained: Collection[str]
) -> tuple[Arrays, Merge]:
    """Of all parameters those that are trained, and what makes the module of them."""
    return {name: whole[name] for name in trained}, lambda params: model.merge({**whole, **params})


def apply_update(
    plan: Plan,
    fields: Optimizer,
    layout: StateLayout,
    state: State,
    gradients: Arrays,
    sums: jax.Array,
    square: jax.Array,
    lr: jax.Array,
) -> tuple[State, jax.Array]:
    """One update from a step's summed gradients.

    sums: [loss sum, weight]; square: of the gradients' norm. Returns the state, and norm before
    clipping, whether the update was made, f16's scale.
    """
    params, scale = state["params"], state["scale"]
    correction = plan.nominal_weight / (sums[1] * scale)
    norm = jnp.sqrt(square) * correction
    finite = jnp.isfinite(norm * sums[0])
    factor = (
        correction * (fields.clip / jnp.maximum(norm, fields.clip)) if fields.clip else correction
    )
    clipped = {
        name: gradient * factor.astype(gradient.dtype) for name, gradient in gradients.items()
    }
    directions, moments = layout.transform.update(clipped, state["moments"], params)
    moved = {
        name: (
            params[name]
            - _scaled_lr(lr, layout.trained[name]).astype(params[name].dtype) * directions[name]
        )
        for name in params
    }
    new = {"params": moved, "moments": moments, **_next_scale(plan, state, finite)}
    kept = {name: new[name] if name in {"scale", "streak"} else state[name] for name in new}
    state = {
        **jax.tree.map(lambda ours, theirs: jnp.where(finite, ours, theirs), new, kept),
        "frozen": state["frozen"],
    }
    return state, jnp.stack([norm, finite.astype(norm.dtype), scale])


def _scaled_lr(lr: jax.Array, rule: ParamRule) -> jax.Array:
    return lr if rule.lr_scale == 1 else lr * rule.lr_scale


def _next_scale(plan: Plan, state: State, finite: jax.Array) -> State:
    """f16's factor: halved after a gradient that is not finite, doubled after many that are."""
    if plan.precision != "f16":
        return {"scale": state["scale"], "streak": state["streak"]}
    streak = jnp.where(finite, state["streak"] + 1, 0)
    grow = streak >= _GROW_AFTER
    scale = jnp.where(
        finite, jnp.where(grow, state["scale"] * 2, state["scale"]), state["scale"] * 0.5
    )
    return {"scale": scale, "streak": jnp.where(grow, 0, streak)}


def _accumulate(
    task: Task, merge: Merge, params: Arrays, rows: Arrays, real: jax.Array, factor: jax.Array
) -> tuple[Arrays, jax.Array]:
    """One device's rounds -> gradients of their scaled sum, and [loss sum, weight]."""
    if real.shape[0] == 1:
        return microbatch_gradients(
            task, merge, params, {name: array[0] for name, array in rows.items()}, real[0], factor
        )

    def add(
        carry: tuple[Arrays, jax.Array], given: tuple[Arrays, jax.Array]
    ) -> tuple[tuple[Arrays, jax.Array], None]:
        return (
            jax.tree.map(jnp.add, carry, microbatch_gradients(task, merge, params, *given, factor)),
            None,
        )

    nothing = jax.tree.map(jnp.zeros_like, params), jnp.zeros(2, factor.dtype)
    total, _ = lax.scan(add, nothing, (rows, real))
    return total


def microbatch_gradients(
    task: Task, merge: Merge, params: Arrays, rows: Arrays, real: jax.Array, factor: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Of one slot: gradients of its scaled sum, and [loss sum, weight]."""

    def scaled(params: Arrays) -> tuple[jax.Array, jax.Array]:
        sums = jnp.stack(
            _masked_sums(
                task, lambda rows: task.loss(merge(params), rows), rows, real, [factor.dtype] * 2
            )
        )
        return sums[0] * factor, sums

    (_, sums), gradients = jax.value_and_grad(scaled, has_aux=True)(params)
    return gradients, sums


def microbatch_metrics(
    task: Task,
    model: FlaxModel,
    specs: SumSpecs,
    params: Arrays,
    rows: Arrays,
    real: jax.Array,
    dtype: Any,
) -> Arrays:
    """The task's sums of one microbatch of an evaluation, counts as integers."""
    integers = jnp.int64 if dtype == np.float64 else jnp.int32

    def values(rows: Arrays) -> list[Any]:
        found: Mapping[str, Any] = task.evaluate(model.merge(params), rows)
        for name, spec in specs.items():
            check_shape(name, jnp.shape(found[name]), spec)
        return [found[name] for name in specs]

    dtypes = [integers if spec.integer else dtype for spec in specs.values()]
    return dict(zip(specs, _masked_sums(task, values, rows, real, dtypes), strict=True))


def _masked_sums(
    task: Task,
    values: Callable[[Arrays], Sequence[Any]],
    rows: Arrays,
    real: jax.Array,
    dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Values added over the rows that count, each in its dtype.

    The others are copies of real ones, so only what spoils the step anyway could make those a nan.
    """
    leave_out: Callable[[Arrays, jax.Array], Arrays] | None = getattr(task, "leave_out", None)
    if leave_out:
        sums = values(leave_out(rows, real))
        return [jnp.asarray(value).astype(dtype) for value, dtype in zip(sums, dtypes, strict=True)]
    by_row = jax.vmap(
        lambda row: [
            jnp.asarray(value)
            for value in values({name: array[None] for name, array in row.items()})
        ]
    )(rows)
    return [
        jnp.where(real.reshape(-1, *[1] * (value.ndim - 1)), value.astype(dtype), 0).sum(
            0, dtype=dtype
        )
        for value, dtype in zip(by_row, dtypes, strict=True)
    ]


def make_evaluation(
    task: Task,
    model: FlaxModel,
    specs: SumSpecs,
    strategy: Strategy,
    layout: StateLayout,
    dtype: Any,
) -> Callable[..., Arrays]:
    """(params, rows, real) -> the task's sums over all devices, by name."""
    shapes = {name: spec.shape for name, spec in model.specs.items()}

    def evaluate(params: Arrays, rows: Arrays, real: jax.Array) -> Arrays:
        own = microbatch_metrics(
            task,
            model,
            specs,
            strategy.gather_params(params, shapes),
            {name: array[0, 0] for name, array in rows.items()},
            real[0, 0],
            dtype,
        )
        found: Arrays = lax.psum(own, AXIS)
        return found

    return jax.jit(
        jax.shard_map(
            evaluate,
            mesh=strategy.mesh,
            in_specs=(all_params(layout.specs), _BY_DEVICE, _BY_DEVICE),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
