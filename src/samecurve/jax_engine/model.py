"""A flax model as named arrays, and back.

Names are paths joined by dots; a complex parameter is held as a pair of real arrays. Initial values
come from core/weights.py, and equal torch's, if the task has a rule for them; else
they come from the model itself.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import broadcast_one_to_all

from samecurve.core.config import Precision
from samecurve.core.protocols import Task
from samecurve.core.weights import values
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, Float, HostArray, PyTree, Shape
from samecurve.jax_engine.complex_pairs import is_complex, join
from samecurve.jax_engine.dropout import key_dropout

InitialValue = Callable[[str], HostArray]  # the initial value of a parameter, by its name


@dataclass(frozen=True)
class ParamSpec:
    """How a parameter is held."""

    shape: Shape  # with a last axis of 2 for a complex parameter
    complex: bool
    matrix: bool  # whether weight decay applies


@dataclass(frozen=True, kw_only=True)
class FlaxModel:
    """A flax module without the values of its parameters.

    graph, eval_graph: the module in training, and after module.eval()
    """

    graph: nnx.GraphDef[nnx.Module]
    eval_graph: nnx.GraphDef[nnx.Module]
    specs: dict[str, ParamSpec]  # in the order of the tree's leaves
    params_tree: jax.tree_util.PyTreeDef
    rest: dict[str, PyTree]  # variables that are not trained, by name
    rest_tree: jax.tree_util.PyTreeDef

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the parameters as they are held."""
        return {name: spec.shape for name, spec in self.specs.items()}

    def merge(self, arrays: Arrays) -> nnx.Module:
        """Make the flax module that is trained from its parameters' arrays."""
        return self.assemble(self.join_complex(arrays))

    def merge_for_eval(self, arrays: Arrays) -> nnx.Module:
        """The same module, which drops nothing."""
        return self._with(self.eval_graph, self.join_complex(arrays), self.rest)

    def join_complex(self, arrays: Arrays) -> Arrays:
        """The parameters with the module's own types: pairs become complex arrays."""
        return {
            name: join(arrays[name]) if spec.complex else arrays[name]
            for name, spec in self.specs.items()
        }

    def held_shapes(self, dtype: Float) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the parameters as they are held, complex ones as pairs."""
        return {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in self.specs.items()}

    def assemble(self, params: Arrays, rest: Mapping[str, PyTree] | None = None) -> nnx.Module:
        """Make the module with new variables, so that changes of a forward pass are forgotten."""
        return self._with(self.graph, params, self.rest if rest is None else rest)

    def _with(
        self, graph: nnx.GraphDef[nnx.Module], params: Arrays, rest: Mapping[str, PyTree]
    ) -> nnx.Module:
        return nnx.merge(
            graph,
            self.params_tree.unflatten([params[name] for name in self.specs]),
            self.rest_tree.unflatten([rest[name] for name in self.rest]),
        )


def open_model(
    task: Task,
    precision: Precision,
    seed: int,
    prepare: Sequence[Callable[[nnx.Module], None]] = (),
) -> tuple[FlaxModel, InitialValue]:
    """The model, and the initial values of its parameters.

    prepare: each changes the model's layers

    UserError: a parameter can't be trained.
    """
    dtype = np.dtype(np.float64 if precision == "f64" else np.float32)

    def make() -> nnx.Module:
        module: nnx.Module = task.model()
        key_dropout(module, seed)
        return module

    def split(module: nnx.Module) -> tuple[FlaxModel, Arrays]:
        for change in prepare:
            change(module)
        return _split(module)

    model, params = split(abstract_model(make))
    rules = {name: task.initial(name, leaf.shape) for name, leaf in params.items()}
    only_model_knows_values = not all(rules.values()) or bool(model.rest)
    if only_model_knows_values:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            model, params = split(make())
        for name, leaf in model.rest.items():
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                model.rest[name] = _from_first_process(leaf)

    def initial_value(name: str) -> HostArray:
        leaf, rule = params[name], rules[name]
        if rule is None:
            value = np.asarray(_from_first_process(leaf))
        else:
            value = values(seed, name, leaf.shape, rule)
        if model.specs[name].complex:
            value = np.stack([value.real, value.imag], axis=-1)
        return value.astype(dtype)

    return model, initial_value


def param_shapes(module: nnx.Module) -> dict[str, Shape]:
    """Shapes of a model's parameters, by their names in a checkpoint."""
    return _split(module)[0].shapes


def named_values(module: nnx.Module) -> dict[str, HostArray]:
    """The values of a module's parameters, by the same names."""
    return {name: np.asarray(leaf) for name, leaf in _split(module)[1].items()}


def abstract_model(make: Callable[[], nnx.Module]) -> nnx.Module:
    """The model without values, or with values if its construction reads them."""
    try:
        return nnx.eval_shape(make)
    except Exception:  # a real error of the model is raised again here
        return make()


def _split(module: nnx.Module) -> tuple[FlaxModel, Arrays]:
    """Split a module into a model and its parameters' values. UserError: two arrays have the same
    name.
    """
    params, rest = nnx.state(module, nnx.Param), nnx.state(module, nnx.Not(nnx.Param))
    names, rest_names = (
        [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        for state in (params, rest)
    )
    duplicates = [name for name, count in Counter(names + rest_names).items() if count > 1]
    if duplicates:
        raise UserError(
            f"two parameters are called {duplicates[0]}: one by its path, one by a dot in a key"
            " of it",
            "keys without dots",
            "task",
        )
    leaves, params_tree = jax.tree.flatten(params)
    rest_leaves, rest_tree = jax.tree.flatten(rest)
    by_name = dict(zip(names, leaves, strict=True))
    graph, state = nnx.split(module)
    in_eval = nnx.merge(graph, state)
    in_eval.eval()
    model = FlaxModel(
        graph=graph,
        eval_graph=nnx.graphdef(in_eval),
        specs={name: _spec(name, leaf) for name, leaf in by_name.items()},
        params_tree=params_tree,
        rest=dict(zip(rest_names, rest_leaves, strict=True)),
        rest_tree=rest_tree,
    )
    return model, by_name


def _from_first_process(value: PyTree) -> PyTree:
    """The first process's value: a user's model may draw other values in each process."""
    return broadcast_one_to_all(value) if jax.process_count() > 1 else value


def is_differentiable(array: jax.Array) -> bool:
    """Whether an array's numbers can have gradients: it is no array of integers or truths."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _spec(name: str, leaf: jax.Array) -> ParamSpec:
    if not is_differentiable(leaf):
        raise UserError(
            f"parameter {name} holds {leaf.dtype}",
            "nnx.Param for what is trained, in float32 or complex64; another nnx.Variable for what"
            " is not",
            "task",
        )
    shape, pair = tuple(leaf.shape), is_complex(leaf)
    return ParamSpec((*shape, 2) if pair else shape, complex=pair, matrix=len(shape) >= 2)


def blocks(model: nnx.Module) -> list[nnx.Module]:
    """The repeated parts of a model: callable elements of its outermost nnx.Lists.

    A list counts if it has at least two of them.
    """
    lists = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.List) and sum(map(callable, module)) > 1
    ]

    def is_inside_another(path: tuple[PyTree, ...]) -> bool:
        return any(other != path and path[: len(other)] == other for other, _ in lists)

    outermost = [module for path, module in lists if not is_inside_another(path)]
    return [
        part
        for module in outermost
        for part in module
        if isinstance(part, nnx.Module) and callable(part)
    ]
