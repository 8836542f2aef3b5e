"""Checks of a task's loss on one jax trace: which parameters it leaves out, draws, or changes."""

import random
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Progress, Task
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, Float, HostArray, PyTree
from samecurve.jax_engine.model import FlaxModel
from samecurve.jax_engine.sample_numbers import with_numbers


def check_loss(
    task: Task,
    model: FlaxModel,
    row: Arrays,
    dtype: Float,
    trained: Collection[str],
    *,
    whole_batch: bool,
) -> tuple[str, ...]:
    """The names of the means beside the loss.

    row: arrays [1, ...].
    whole_batch: the loss is of features.

    UserError: trained parameters that the loss does not use, numbers drawn in it, variables changed
    in it.
    """
    changed: list[str] = []
    names: set[str] = set()

    def losses_of(module: nnx.Module, progress: Progress) -> Mapping[str, Mean]:
        if not whole_batch:
            return with_numbers(lambda row: task.losses(module, row, progress), row)
        features = with_numbers(lambda row: task.features(module, row, progress), row)
        twice = {name: jnp.concatenate([rows, rows]) for name, rows in features.items()}
        return task.batch_losses(twice, progress)

    def loss(params: Arrays, rest: Mapping[str, PyTree], when: jax.Array) -> tuple[PyTree, PyTree]:
        module = model.assemble(params, rest)
        before = _variables(module)
        losses = losses_of(module, Progress(*when))
        mean = losses["loss"]
        names.update(losses.keys() - {"loss"})
        after = _variables(module)
        changed.extend(name for name, value in before.items() if after.get(name) is not value)
        return mean.sum, mean.weight

    held = {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in model.specs.items()}
    params = jax.eval_shape(model.join_complex, held)
    jaxpr = jax.make_jaxpr(loss)(params, model.rest, np.zeros(2, np.int64)).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    inputs = [name for part in (params, model.rest) for name in _names_of_leaves(part)]
    is_used = dict(zip(inputs, used[:-1], strict=True))  # the last: when
    _refuse(
        unused=[name for name in model.specs if not is_used[name] and name in trained],
        drawn=[name for name in model.rest if is_used[name] and _is_key(model.rest[name])],
        changed=changed,
    )
    return tuple(sorted(names))


def check_repeats(
    task: Task,
    model: FlaxModel,
    row: Mapping[str, HostArray],
    dtype: Float,
    *,
    whole_batch: bool = False,
) -> None:
    """row: arrays [1, ...]. whole_batch: the loss is of features.

    UserError: a second trace of the loss is another program, so that each process would compile
    another: numbers of numpy or Python were drawn, or something that the loss reads has changed.
    """
    held = {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in model.specs.items()}
    params = jax.eval_shape(model.join_complex, held)
    arrays = {name: jnp.asarray(array) for name, array in row.items()}

    def trace() -> tuple[str, list[HostArray]]:
        def outputs(params: Arrays, rest: Mapping[str, PyTree], row: Arrays) -> PyTree:
            module = model.assemble(params, rest)
            if not whole_batch:
                return with_numbers(lambda row: task.loss(module, row), row)
            features = with_numbers(lambda row: task.features(module, row), row)
            twice = {name: jnp.concatenate([rows, rows]) for name, rows in features.items()}
            return task.batch_losses(twice)

        closed = jax.make_jaxpr(outputs)(params, model.rest, arrays)
        return str(closed.jaxpr), [np.asarray(constant) for constant in closed.consts]

    python, numpy = random.getstate(), str(np.random.get_state(legacy=False))
    (program, constants), (again, others) = trace(), trace()
    drawn = [
        name
        for name, same in (
            ("random", python == random.getstate()),
            ("np.random", numpy == str(np.random.get_state(legacy=False))),
        )
        if not same
    ]
    equal = program == again and all(
        np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        for one, other in zip(constants, others, strict=True)
    )
    if drawn:
        raise UserError(
            f"the loss draws numbers of {drawn[0]} while it is compiled: each process and each"
            " start would compile others in, the same for every row and step",
            "samecurve.rng(batch) in the loss, whose numbers follow the sample; or numbers that the"
            " data holds",
            "task",
        )
    if not equal:
        raise UserError(
            "the loss is another program each time that it is traced: it depends on something that"
            " its calls change (an attribute of the task, a counter, a clock)",
            "compute it from the model and the batch alone",
            "task",
        )


def _names_of_leaves(arrays: Mapping[str, PyTree]) -> list[str]:
    """In the order in which jax flattens them."""
    return jax.tree.leaves({name: name for name in arrays})


def _variables(module: nnx.Module) -> dict[str, PyTree]:
    """Values of what is neither trained nor a counter of random numbers."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))
    return {
        ".".join(map(str, path)): (
            variable.get_value() if isinstance(variable, nnx.Variable) else variable
        )
        for path, variable in state
    }


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _refuse(*, unused: list[str], drawn: list[str], changed: list[str]) -> None:
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
            "nnx.Param for what is trained, values passed on for the rest (no running statistics,"
            " as of SpectralNorm or BatchNorm)",
            "task",
        )
    if unused:
        raise UserError(
            f"the loss does not use {_some(unused)}: weight decay alone would move"
            f" {'it' if len(unused) == 1 else 'them'}",
            "leave such parameters out of the model, freeze them (optimizer.groups), or use them in"
            " the loss",
            "task",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
