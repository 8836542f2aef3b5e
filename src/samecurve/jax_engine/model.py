"""A flax model as named arrays, and back: names are paths joined by dots, complex parameters pairs
of real ones.

Initial values come from core/determinism/init_values.py where the task has a rule for them, so that
they are torch's; else from the model itself.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import broadcast_one_to_all
from numpy.typing import NDArray

from samecurve.core.config.sections import Precision, Recompute
from samecurve.core.determinism.init_values import values
from samecurve.core.protocols import Task
from samecurve.errors import UserError
from samecurve.jax_engine.complex_pairs import is_complex, join

InitialValue = Callable[[str], NDArray[Any]]  # a parameter's initial values, by name


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as it is held.

    shape: with a last dimension of 2 where it is complex. matrix: whether weight decay reaches it.
    """

    shape: tuple[int, ...]
    complex: bool
    matrix: bool


@dataclass(frozen=True)
class FlaxModel:
    """specs: by name, in the order of the tree's leaves. rest: what is not trained, by name."""

    graph: Any
    tree: Any
    rest_tree: Any
    rest: dict[str, Any]
    specs: dict[str, ParamSpec]

    def merge(self, arrays: Mapping[str, Any]) -> Any:
        """name -> array, as the flax module."""
        return self.assemble(self.join_complex(arrays))

    def join_complex(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Complex parameters as the module has them."""
        return {
            name: join(arrays[name]) if spec.complex else arrays[name]
            for name, spec in self.specs.items()
        }

    def assemble(self, parameters: Mapping[str, Any], rest: Mapping[str, Any] | None = None) -> Any:
        """The module, its variables made anew: a forward pass may change them, and is forgotten."""
        rest = self.rest if rest is None else rest
        return nnx.merge(
            self.graph,
            self.tree.unflatten([parameters[name] for name in self.specs]),
            self.rest_tree.unflatten([rest[name] for name in self.rest]),
        )


def open_model(
    task: Task, precision: Precision, how: Recompute, seed: int
) -> tuple[FlaxModel, InitialValue]:
    """The model, and the initial values of its parameters.

    UserError: some that can't be trained.
    """
    real = np.dtype(np.float64 if precision == "f64" else np.float32)
    outline = abstract_model(task.model)
    names, leaves, tree, rest, rest_tree = _split(outline, how)
    rules = [task.initial(name, leaf.shape) for name, leaf in zip(names, leaves, strict=True)]
    own = not all(rules) or bool(rest)  # values that only the model knows
    model = outline
    if own:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model = task.model()
        names, leaves, tree, rest, rest_tree = _split(model, how)
        rest = {
            name: leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else _from_first_process(leaf)
            for name, leaf in rest.items()
        }
    graph = nnx.graphdef(model)
    specs = {name: _spec(name, leaf) for name, leaf in zip(names, leaves, strict=True)}
    given = {name: (leaf, rule) for name, leaf, rule in zip(names, leaves, rules, strict=True)}

    def value(name: str) -> NDArray[Any]:
        leaf, rule = given[name]
        found = (
            np.asarray(_from_first_process(leaf))
            if rule is None
            else values(seed, name, leaf.shape, rule)
        )
        if specs[name].complex:
            found = np.stack([found.real, found.imag], axis=-1)
        return found.astype(real)

    return FlaxModel(graph, tree, rest_tree, rest, specs), value


def param_shapes(outline: Any) -> dict[str, tuple[int, ...]]:
    """Of a model's parameters, by a checkpoint's names."""
    names, leaves, *_ = _split(outline, "none")
    return {name: _spec(name, leaf).shape for name, leaf in zip(names, leaves, strict=True)}


def named_values(model: Any) -> dict[str, NDArray[Any]]:
    """A module's parameters by those names, as it has them."""
    names, leaves, *_ = _split(model, "none")
    return {name: np.asarray(leaf) for name, leaf in zip(names, leaves, strict=True)}


def abstract_model(model: Callable[[], Any]) -> Any:
    """The model without values, or with them where it looks at them while it is built."""
    try:
        return nnx.eval_shape(model)
    except Exception:  # whatever is really wrong comes again
        return model()


def _split(model: Any, how: Recompute) -> tuple[list[str], list[Any], Any, dict[str, Any], Any]:
    """Names and leaves of the parameters, their tree, what else the model holds, and that one's
    tree. UserError: two of one name.
    """
    recompute(model, how)
    params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    names, others = (
        [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        for state in (params, rest)
    )
    twice = [name for name, count in Counter(names + others).items() if count > 1]
    if twice:
        raise UserError(
            f"two parameters are called {twice[0]}: one by its path, one by a dot in a key of it",
            "keys without dots",
            "task",
        )
    leaves, tree = jax.tree.flatten(params)
    kept, rest_tree = jax.tree.flatten(rest)
    return names, leaves, tree, dict(zip(others, kept, strict=True)), rest_tree


def _from_first_process(value: Any) -> Any:
    """The first process's: a user's model may draw its values otherwise in each."""
    return broadcast_one_to_all(value) if jax.process_count() > 1 else value


def _spec(name: str, leaf: Any) -> ParamSpec:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise UserError(
            f"parameter {name} holds {leaf.dtype}",
            "nnx.Param for what is trained, in float32 or complex64; another nnx.Variable for what"
            " is not",
            "task",
        )
    pair = is_complex(leaf)
    return ParamSpec((*leaf.shape, 2) if pair else tuple(leaf.shape), pair, len(leaf.shape) >= 2)


def blocks(model: Any) -> list[Any]:
    """The repeated parts: the elements of the outermost nnx.Lists of at least two modules that can
    be called.
    """
    lists = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.List) and sum(map(callable, module)) > 1
    ]
    outer = [
        module
        for path, module in lists
        if not any(other != path and path[: len(other)] == other for other, _ in lists)
    ]
    return [
        part
        for module in outer
        for part in module
        if isinstance(part, nnx.Module) and callable(part)
    ]


def recompute(model: Any, how: Recompute) -> None:
    """Let each block run again in backward instead of keeping what it computed; names and results
    stay.
    """
    if how == "none":
        return
    policy = _keep_real_products if how == "selective" else None
    kinds = {
        kind: _recomputed_class(kind, policy) for kind in {type(block) for block in blocks(model)}
    }
    for block in blocks(model):
        block.__class__ = kinds[type(block)]


def _recomputed_class(kind: Any, policy: Any) -> Any:
    """The class, its calls run again in backward."""

    def call(block: Any, *arguments: Any, **keywords: Any) -> Any:
        graph, state = nnx.split(block)
        pure = jax.checkpoint(
            lambda state, *given, **named: kind.__call__(nnx.merge(graph, state), *given, **named),
            policy=policy,
        )
        return pure(state, *arguments, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call})


def _keep_real_products(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """What "selective" keeps: products with weights.

    Not complex ones: jax.checkpoint can't keep complex values (reduce_precision refuses them).
    """
    whether: Callable[..., bool] = partial(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, primitive
    )
    return whether(*inputs, **parameters) and not any(is_complex(one) for one in inputs)
