"""Checks of a task's loss on a jax trace.

They find parameters that the loss does not use, numbers that it draws and variables it changes.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from samecurve.core.determinism import Mean
from samecurve.core.protocols import START, Progress
from samecurve.core.system import KERNEL, PRODUCTS
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, HostArray, PyTree
from samecurve.jax_engine.dropout import refuse_repeated_masks
from samecurve.jax_engine.sample_numbers import KEYS, with_numbers
from samecurve.jax_engine.step_program import Setup


class TracedLoss(NamedTuple):
    """What a trace of the loss tells.

    names: of the means beside the loss
    unused: parameters that the loss does not use
    draws: whether the loss, or a mean beside it, takes numbers from its rows' keys
    """

    names: tuple[str, ...]
    unused: frozenset[str]
    draws: bool


def check_loss(setup: Setup, row: Arrays) -> TracedLoss:
    """Check one trace of the loss.

    row: arrays [1, ...].

    UserError: the loss draws numbers other than its rows', or changes variables.
    """
    model = setup.model
    changed: list[str] = []
    names: set[str] = set()
    keys = {name: array for name, array in row.items() if name == KEYS}

    def loss(
        params: Arrays, rest: Mapping[str, PyTree], when: jax.Array, keys: Arrays
    ) -> tuple[PyTree, ...]:
        module = model.assemble(params, rest)
        before = _variables(module)
        losses = _losses(setup, module, {**row, **keys}, Progress(*when))
        names.update(losses.keys() - {"loss"})
        after = _variables(module)
        changed.extend(name for name, value in before.items() if after.get(name) is not value)
        return (*losses["loss"], *(losses[name] for name in sorted(names)))

    params = jax.eval_shape(model.join_complex, model.held_shapes(setup.dtype))
    jaxpr = jax.make_jaxpr(loss)(params, model.rest, np.zeros(2, np.int64), keys).jaxpr
    refuse_repeated_masks(jaxpr)
    _, all_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    _, used = dce_jaxpr(jaxpr, [place < len(Mean._fields) for place in range(len(jaxpr.outvars))])
    inputs = [  # in the order in which jax flattens them
        name
        for part in (params, model.rest)
        for name in jax.tree.leaves({name: name for name in part})
    ]
    is_used = dict(zip(inputs, used, strict=False))  # after them come `when` and the keys
    _refuse(
        drawn=[
            name
            for name, leaf in model.rest.items()
            if is_used[name] and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ],
        changed=changed,
    )
    unused = frozenset(name for name in model.specs if not is_used[name])
    draws = not keys or any(all_used[len(inputs) + 1 :])  # without a key nobody knows
    return TracedLoss(tuple(sorted(names)), unused, draws)


def check_repeats(setup: Setup, row: Mapping[str, HostArray]) -> str:
    """Check that two traces of the loss are the same program.

    row: arrays [1, ...].
    Returns what a run in float64 computes in float32, with its line; '': nothing.
    UserError: they differ, so each process would compile another program: the loss draws numbers
    from numpy or Python, or something that it reads changes.
    """
    model = setup.model
    params = jax.eval_shape(model.join_complex, model.held_shapes(setup.dtype))
    arrays = {name: jnp.asarray(array) for name, array in row.items()}

    def trace() -> tuple[Any, list[HostArray]]:
        def outputs(params: Arrays, rest: Mapping[str, PyTree], row: Arrays) -> PyTree:
            return _losses(setup, model.assemble(params, rest), row, START)

        closed = jax.make_jaxpr(outputs)(params, model.rest, arrays)
        return closed.jaxpr, [np.asarray(constant) for constant in closed.consts]

    before = _random_states()
    (program, constants), (again, others) = trace(), trace()
    after = _random_states()
    drawn = [name for name in before if before[name] != after[name]]
    equal = str(program) == str(again) and all(
        np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        for one, other in zip(constants, others, strict=True)
    )
    if drawn:
        raise UserError(
            f"the loss draws numbers of {drawn[0]} while it is compiled: each process and each"
            " start would compile other numbers in, the same for every row and step",
            "samecurve.rng(batch) in the loss, whose numbers follow the sample; or numbers from the"
            " data",
            "task",
        )
    if not equal:
        raise UserError(
            "the loss is another program each time jax traces it: it depends on something that"
            " changes between calls (an attribute of the task, a counter, a clock)",
            "compute it from the model and the batch alone",
            "task",
        )
    return _in_float32(program) if setup.plan.compute.precision == "f64" else ""


def _in_float32(program: Any) -> str:
    """The first equation of a program that gives a number in float32, with its line."""
    for equation in program.eqns:
        formats = {getattr(variable.aval, "dtype", None) for variable in equation.outvars}
        if jnp.dtype(jnp.float32) in formats:
            return f"{_line_of(equation)}{equation.primitive.name}"
        for inner in jax.core.jaxprs_in_params(equation.params):
            if found := _in_float32(inner):
                return found
    return ""


def _line_of(equation: Any) -> str:
    """ "file:line: " of the user's code; '': of none that is known."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file = Path(frame.file_name)
        is_installed = {"site-packages", "dist-packages"}.intersection(file.parts)
        if not is_installed and not any(map(file.is_relative_to, (KERNEL, PRODUCTS))):
            return f"{file}:{frame.line_num}: "
    return ""


def _random_states() -> dict[str, str]:
    """The states of the random numbers of Python and of numpy."""
    return {"random": str(random.getstate()), "np.random": str(np.random.get_state(legacy=False))}


def _losses(
    setup: Setup, module: nnx.Module, row: Arrays, progress: Progress
) -> Mapping[str, Mean]:
    """The loss of a row and the means beside it; over the whole batch that of two equal rows."""
    task = setup.task
    if not setup.plan.sees_whole_batch:
        return with_numbers(lambda row: task.losses(module, row, progress), row)
    features = with_numbers(lambda row: task.features(module, row, progress), row)
    twice = {name: jnp.concatenate([rows, rows]) for name, rows in features.items()}
    return task.batch_losses(twice, progress)


def _variables(module: nnx.Module) -> dict[str, PyTree]:
    """The values of variables that are neither trained nor counters of random numbers."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
    return {
        ".".join(map(str, path)): (
            variable.get_value() if isinstance(variable, nnx.Variable) else variable
        )
        for path, variable in state
    }


def _refuse(*, drawn: list[str], changed: list[str]) -> None:
    if drawn:
        raise UserError(
            f"the loss depends on random numbers of {drawn[0]}: every row and step would see the"
            " same ones",
            "samecurve.rng(batch) in the loss, whose numbers follow the sample; dropout: --engine"
            " torch, whose masks do",
            "task",
        )
    if changed:
        raise UserError(
            f"the forward pass changes {_some(changed)}, which the next step would not see",
            "nnx.Param for trained values; pass other values on as results (no running statistics,"
            " as in SpectralNorm or BatchNorm)",
            "task",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
