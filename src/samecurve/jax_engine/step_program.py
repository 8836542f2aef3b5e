"""One optimizer step, and the parts of which its compiled programs are made.

Some rows only fill up a compiled shape; sum and weight leave them out. If the task has
leave_out(rows, real) it leaves them out itself, and a microbatch is computed as a whole. Else rows
are mapped one by one (vmap): this works for any loss and costs layout copies (measured 10 % of a
step of models/tiny.yaml on two CPU devices).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.stages import Compiled, Wrapped
from jax.typing import ArrayLike, DTypeLike

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism import Mean
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
from samecurve.jax_engine.array_types import Arrays, Float, HostArray
from samecurve.jax_engine.checkpoint import State, StateLayout, all_params
from samecurve.jax_engine.model import FlaxModel
from samecurve.jax_engine.runtime import deterministic_jit
from samecurve.jax_engine.sample_numbers import KEYS, with_numbers
from samecurve.jax_engine.sharded_calls import parts_of, shard_map
from samecurve.jax_engine.strategies import Strategy

_NUMBERS = NumberFunctions(divide=jnp.divide, maximum=jnp.maximum, is_finite=jnp.isfinite)
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


@dataclass(kw_only=True)
class Setup:
    """The parts of which the compiled programs of a run are made."""

    task: Task
    plan: Plan
    optimizer: Optimizer  # the config's section
    model: FlaxModel
    strategy: Strategy
    layout: StateLayout
    dtype: Float
    devices: Sequence[jax.Device]  # of this process
    features: Sequence[Any] = ()  # the hooks of the run's features (feature_hooks.py)
    means: tuple[str, ...] = ()  # beside the loss, known once the loss has been looked at

    @property
    def num_totals(self) -> int:
        """How many numbers GradientSums.totals has."""
        return 2 + 2 * len(self.means)

    def whole_params(self, params: Arrays) -> list[Arrays]:
        """Parameters over all devices: whole on each device of this process."""
        if self.plan.layout.shards > 1:
            params = self._gather_program(params)
        return parts_of(params, self.devices)

    @cached_property
    def _gather_program(self) -> Wrapped:
        strategy, shapes = self.strategy, self.model.shapes
        return self.compiled(
            shard_map(
                lambda shards: strategy.gather_params(shards, shapes),
                mesh=strategy.mesh,
                in_specs=(all_params(self.layout.specs),),
                out_specs=PartitionSpec(),
            )
        )

    def compiled(self, program: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Wrapped:
        """Compile a program with the kernels that the plan allows. donate: see donate_argnums."""
        if self.plan.compute.deterministic:
            return deterministic_jit(program, donate_argnums=donate)
        return jax.jit(program, donate_argnums=donate)


StateT = TypeVar("StateT")
SumsT = TypeVar("SumsT")
ReducedT = TypeVar("ReducedT")


class StepInputs(NamedTuple):
    """What a step takes beside the state."""

    rows: Any  # as staged for the plan's reducer: see StagedRounds
    extra: jax.Array  # [devices, n]: numbers that are added up over devices
    lr: ArrayLike
    when: ArrayLike  # [step, epoch], from progress_array()


class Reduced(NamedTuple):
    """The sums of a step over all devices."""

    sums: GradientSums
    squared_norm: jax.Array  # of the whole gradient
    extra: jax.Array  # the numbers that processes add up beside it


class Steps(ABC, Generic[StateT, SumsT, ReducedT]):
    """The steps of a run, on this process's devices.

    Each reducer has a subclass. It says in which order a device's microbatches are added, what adds
    over devices, and how much of a step is one compiled program.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def step(self, state: StateT, inputs: StepInputs, num_samples: int) -> tuple[StateT, jax.Array]:
        """One optimizer step. Returns the new state and metrics: loss sum, weight, sum and weight
        of each other mean, the sums of extra, gradient norm before clipping, whether the update was
        made, f16's scale.

        state: its arrays can't be used afterwards.
        num_samples: of the whole step.
        """
        sums = self.gradient_sums(state, inputs, num_samples)
        reduced = self.reduce(sums, inputs.extra, num_samples)
        return self.update(state, reduced, inputs.lr)

    @abstractmethod
    def gradient_sums(self, state: StateT, inputs: StepInputs, num_samples: int) -> SumsT:
        """Gradients and totals of this process's microbatches, not yet added over devices."""

    @abstractmethod
    def reduce(self, sums: SumsT, extra: jax.Array, num_samples: int) -> ReducedT:
        """The sums over all devices."""

    @abstractmethod
    def update(self, state: StateT, reduced: ReducedT, lr: Any) -> tuple[StateT, jax.Array]:
        """The state after the step, and its metrics."""

    def run(self, state: StateT, inputs: StepInputs, num_samples: int) -> tuple[StateT, jax.Array]:
        """Queue a step, as its programs are compiled. Arguments and results: as of step()."""
        return self.step(state, inputs, num_samples)

    def compiled_step(
        self, _state: StateT, _inputs: StepInputs, _num_samples: int
    ) -> Compiled | None:
        """The step as XLA compiled it; None: it is several programs. Arguments: as of step()."""
        return None

    @abstractmethod
    def place(self, state: State) -> StateT:
        """The state as steps take it."""

    @abstractmethod
    def one_state(self, state: StateT) -> State:
        """The state as arrays over all devices."""

    @abstractmethod
    def rows_again(self, rows: Any, number: int, index: int) -> tuple[Rows, int]:
        """Rows to compute one microbatch again, [devices, n, microbatch, ...], and the place among
        the n that has the microbatch of this number on its device.

        index: its accumulation step
        """


def progress_array(progress: Progress) -> HostArray:
    """Progress as the programs take it: [step, epoch].

    jax keeps the 64 bits in f64 runs, so that a share of all steps is computed in f64 there.
    """
    return np.array([progress.step, progress.epoch], np.int64)


def progress_of(when: Any) -> Progress:
    """What progress_array() gave, as a loss takes it."""
    return Progress(*when)


def first_of(rows: Rows) -> Rows:
    """Drop the first axis, which has one entry."""
    first: Rows = jax.tree.map(lambda array: array[0], rows)
    return first


def split_trained(setup: Setup, whole: Arrays) -> tuple[Arrays, Merge]:
    """The trained parameters, and a function that makes the module from values of them."""
    params = {name: whole[name] for name in setup.layout.trained}
    return params, lambda params: setup.model.merge({**whole, **params})


def apply_update(
    setup: Setup, state: State, reduced: Reduced, lr: jax.Array
) -> tuple[State, jax.Array]:
    """Update the parameters from a step's summed gradients, unless a gradient is not finite.

    Returns the state and the step's metrics, as Steps.step() does.
    """
    plan, layout, sums = setup.plan, setup.layout, reduced.sums
    params, scale = state["params"], state["scale"]
    scaling = scale_gradient(
        loss_sum=sums.totals[0],
        weight=sums.totals[1],
        summed_norm=jnp.sqrt(reduced.squared_norm),
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
    for feature in setup.features:
        clipped = feature.before_update(clipped)
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
    of_update = jnp.stack([norm, finite.astype(norm.dtype), scale])
    return updated, jnp.concatenate([sums.totals, reduced.extra, of_update])


def microbatch_gradients(
    setup: Setup, whole: Arrays, rows: Rows, scale: jax.Array, when: ArrayLike
) -> GradientSums:
    """The gradient sums of one microbatch.

    whole: the parameters, of which the trained ones get gradients
    scale: f16's factor of the loss
    """
    task, factor = setup.task, loss_factor(scale, setup.plan.nominal_weight)
    trained, merge = split_trained(setup, whole)
    dtypes = [factor.dtype] * setup.num_totals

    def scaled_loss(trained: Arrays) -> tuple[jax.Array, jax.Array]:
        def sums(arrays: Arrays) -> list[ArrayLike]:
            losses = task.losses(merge(trained), arrays, progress_of(when))
            check_names(losses, setup.means)
            return totals_of(losses, setup.means)

        totals = jnp.stack(_masked_sums(task, sums, rows, dtypes))
        return totals[0] * factor, totals

    (_, totals), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(trained)
    return GradientSums(gradients, totals)


def totals_of(losses: Mapping[str, Mean], means: Sequence[str]) -> list[ArrayLike]:
    """Sum and weight of the loss, then of each of these means beside it."""
    return [number for name in ("loss", *means) for number in losses[name]]


def microbatch_metrics(setup: Setup, params: Arrays, rows: Rows, when: ArrayLike) -> Arrays:
    """The task's sums of one microbatch of an evaluation, counts as integers."""
    task, specs, dtype = setup.task, setup.task.eval_sums(), setup.dtype
    integers = jnp.int64 if dtype == np.float64 else jnp.int32

    def values(arrays: Arrays) -> list[ArrayLike]:
        module = setup.model.merge_for_eval(params)
        by_name: Mapping[str, ArrayLike] = task.evaluate(module, arrays, progress_of(when))
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
