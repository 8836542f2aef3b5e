"""A training state as one tree of arrays, and the names of these arrays in a checkpoint.

The names are the same as in torch_engine/checkpoint.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from samecurve.core.config.param_groups import ParamRule
from samecurve.core.config.sections import Optimizer
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import ArrayShard, Checkpoint, arrays_to_write
from samecurve.core.weights import AVERAGE, LATE, check_finite, check_fit, check_weights
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Arrays, Float, HostArray, PyTree, ReadBox, Shape
from samecurve.jax_engine.model import FlaxModel, InitialValue
from samecurve.jax_engine.strategies import Strategy
from samecurve.units import first_and_count

INITIAL_SCALE = 2.0**16
# optax's names -> torch's
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
# dtypes in a checkpoint's files; torch counts steps in float32
_FILE_DTYPES = {"float64": "F64", "float32": "F32", "int32": "F32"}
_OPTIONAL = {"optimizer/step", "loop/scale", "loop/scale_streak"}  # a checkpoint may lack these


class State(TypedDict):
    """Everything that training changes, as one tree of arrays."""

    params: Arrays  # trained parameters
    frozen: Arrays  # parameters that are not trained
    average: Arrays  # moving averages of the trained parameters, if a feature keeps some
    moments: PyTree  # optax's state
    scale: jax.Array  # f16's factor of the loss
    streak: jax.Array  # finite steps since the scale last changed


def make_optimizer(
    fields: Optimizer, rules: Mapping[str, ParamRule]
) -> optax.GradientTransformation:
    """Build AdamW or SGD with torch's formulas; updates times the learning rate are subtracted.

    rules: the rule of each trained parameter, by name.
    """
    values = sorted({rule.weight_decay for rule in rules.values()} - {0.0})
    decay = [
        optax.add_decayed_weights(
            value, mask={name: rule.weight_decay == value for name, rule in rules.items()}
        )
        for value in values
    ]
    if fields.name == "adamw":
        return optax.chain(optax.scale_by_adam(*fields.betas, fields.eps), *decay)
    # torch adds sgd's decay to the gradient
    return optax.chain(*decay, optax.trace(fields.momentum))


def all_params(state: State) -> Arrays:
    """All parameters of a state, or the leaves that a tree of specs has for them."""
    return {**state["frozen"], **state["params"]}


def averaged_params(state: State) -> Arrays:
    """All parameters for evaluation and sampling: their moving averages, if the run has them."""
    return {**all_params(state), **state["average"]}


@dataclass(frozen=True)
class Entry:
    """A leaf of the state's tree."""

    name: str  # in a checkpoint
    shape: Shape  # of the whole array
    dtype: np.dtype[Any]


class StateLayout:
    """Names, shapes and places of a state's leaves.

    trained: the rule of each trained parameter, by name.
    UserError: a group of the config matches no parameter.
    """

    def __init__(
        self,
        model: FlaxModel,
        optimizer: Optimizer,
        strategy: Strategy,
        dtype: Float,
        plan: Plan,
        *,
        has_average: bool = False,
    ) -> None:
        self._strategy = strategy
        self._loss_scaled = plan.compute.precision == "f16"  # its scale belongs to the state
        optimizer.rules.check_names(model.specs)
        rules = {
            name: optimizer.rules.rule_for(name, matrix=spec.matrix)
            for name, spec in model.specs.items()
        }
        self.trained = {name: rule for name, rule in rules.items() if not rule.frozen}
        shapes = model.held_shapes(dtype)
        params = {name: shape for name, shape in shapes.items() if name in self.trained}
        frozen = {name: shape for name, shape in shapes.items() if name not in self.trained}
        scalar = jax.ShapeDtypeStruct((), dtype)
        self.transform = make_optimizer(optimizer, self.trained)
        outline = {
            "params": params,
            "frozen": frozen,
            "average": dict(params) if has_average else {},
            "moments": jax.eval_shape(self.transform.init, params),
            "scale": scalar,
            "streak": scalar,
        }
        leaves, tree = jax.tree_util.tree_flatten_with_path(outline)
        # The trained parameters that the loss does not use, which stay as they are; as a checkpoint
        # says, until leave_out() knows.
        self.left_out: Sequence[str] = ()
        self._late: Sequence[str] = ()  # the parameters of a checkpoint that began late, or not yet
        self._tree: PyTree = tree
        self._entries = [Entry(_name(path), tuple(leaf.shape), leaf.dtype) for path, leaf in leaves]

    @property
    def specs(self) -> State:
        """A tree like the state, of partition specs."""
        specs: State = self._tree.unflatten(
            [self._strategy.spec(entry.shape) for entry in self._entries]
        )
        return specs

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of whole arrays, by their names in a checkpoint."""
        return {entry.name: entry.shape for entry in self._entries}

    def init(self, value: InitialValue, weights: Checkpoint | None = None) -> State:
        """A first state, whose moments are zero.

        weights: replace the model's initial values. UserError: they don't fit.
        """
        if weights:
            shapes = {
                entry.name: entry.shape
                for entry in self._entries
                if entry.name.startswith("model/")
            }
            saved_shapes = {name: weights.arrays.shape(name) for name in weights.arrays}
            check_weights(saved_shapes, shapes, (), weights.path)

        def reader(entry: Entry) -> ReadBox:
            stored = _weight_name(entry.name)
            if not stored.startswith("model/"):
                return self._initial_value(entry)
            if weights and stored in weights.arrays:
                return partial(weights.arrays.part, stored)
            return _reader_of(value(stored.removeprefix("model/")))

        return self._make(reader)

    def restore(self, saved: Checkpoint) -> State:
        """The state of a checkpoint, made by any engine, precision, strategy or world size.

        UserError: names or shapes don't fit.
        """
        shapes = self.shapes
        averages = {name for name in (*shapes, *saved.arrays) if name.startswith(AVERAGE)}
        late = {f"{LATE}{name}" for name in self.trained}.intersection(saved.arrays)
        late_counts = {name for name in saved.arrays if name.startswith("optimizer/step/late/")}
        check_fit(saved, shapes, _OPTIONAL | averages | late | late_counts)
        self._late = [name for name in self.trained if f"{LATE}{name}" in late]
        self.left_out = [name for name in self._late if not saved.arrays[f"{LATE}{name}"]]

        def reader(entry: Entry) -> ReadBox:
            stored = entry.name if entry.name in saved.arrays else _weight_name(entry.name)
            if stored in saved.arrays and self._is_stored(entry.name):
                return partial(saved.arrays.part, stored)
            return self._initial_value(entry)

        return self._make(reader)

    def leave_out(self, unused: Collection[str], *, is_new: bool) -> None:
        """Leave parameters as they are in every step: those that the loss does not use; in a run
        that goes on, those of them that it never used.

        UserError: the checkpoint has a parameter that the loss uses, and that was first used after
        the first step, or not yet: its count of updates is its own, and there is one count here.
        """
        late = [name for name in self._late if name not in unused]
        if late:
            raise UserError(
                f"the run began to use {first_and_count(late)} after its first step, so that the"
                " count of its updates is its own; engine jax has one count for all parameters",
                "--engine torch",
                "engine",
            )
        if is_new:
            self.left_out = [name for name in self.trained if name in unused]

    def gather(
        self, state: State, finite: Sequence[bool], *, process: int, world_size: int
    ) -> list[ArrayShard]:
        """Copies in host memory of the arrays that this process writes.

        finite: for each leaf, from finite(). RunError: a leaf has a value that is not finite.
        """
        not_finite = [entry.name for entry, ok in zip(self._entries, finite, strict=True) if not ok]
        check_finite(not_finite)
        sizes = {
            entry.name: array.nbytes
            for entry, array in self._stored_entries(state)
            if array.is_fully_replicated
        }
        written_here = set(arrays_to_write(sizes, world_size, process))
        shards = []
        for entry, array in self._stored_entries(state):
            if array.is_fully_replicated and entry.name not in written_here:
                continue
            offsets, values = self._strategy.local_shard(array, entry.shape)
            if not values.size:
                continue
            file_dtype = _FILE_DTYPES[values.dtype.name]
            if values.dtype == np.int32:
                values = values.astype(np.float32)
            shards.append(ArrayShard(entry.name, file_dtype, entry.shape, offsets, values))
        if process == 0:
            not_used = np.zeros((), np.int64)
            shards += [
                ArrayShard(f"{LATE}{name}", "I64", (), (), not_used) for name in self.left_out
            ]
        return shards

    def finite(self, state: State) -> jax.Array:
        """For each leaf whether all its values are finite. The caller compiles this."""
        return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)])

    def named_arrays(self, state: State) -> Iterator[tuple[str, jax.Array]]:
        """The arrays of a state that a checkpoint holds, by name."""
        return ((entry.name, array) for entry, array in self._stored_entries(state))

    def _stored_entries(self, state: State) -> Iterator[tuple[Entry, jax.Array]]:
        return (
            (entry, leaf)
            for entry, leaf in zip(self._entries, jax.tree.leaves(state), strict=True)
            if self._is_stored(entry.name)
        )

    def _is_stored(self, name: str) -> bool:
        return self._loss_scaled or not name.startswith("loop/")

    def _initial_value(self, entry: Entry) -> ReadBox:
        """The initial value of an array that is no parameter: zeros, or the initial loss scale."""
        value = 0.0
        if entry.name == "loop/scale":
            value = INITIAL_SCALE if self._loss_scaled else 1.0
        return lambda _offsets, shape: np.full(shape, value)

    def _make(self, reader: Callable[[Entry], ReadBox]) -> State:
        put = self._strategy.put
        leaves = [put(entry.shape, entry.dtype, reader(entry)) for entry in self._entries]
        state: State = self._tree.unflatten(leaves)
        return state


def _reader_of(values: HostArray) -> ReadBox:
    def read(offsets: Shape, shape: Shape) -> HostArray:
        box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
        return values[box]

    return read


def _weight_name(name: str) -> str:
    """The name of the weight with which a moving average begins; other names are unchanged."""
    return f"model/{name.removeprefix(AVERAGE)}" if name.startswith(AVERAGE) else name


def _name(path: Sequence[Any]) -> str:
    """The canonical name of the leaf at a path of jax's keys."""
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if keys[0] in {"params", "frozen"}:
        return f"model/{keys[-1]}"
    if keys[0] == "average":
        return f"{AVERAGE}{keys[-1]}"
    if keys[0] == "moments":
        moment = next((_MOMENTS[key] for key in keys if key in _MOMENTS), None)
        return f"optimizer/{moment}/{keys[-1]}" if moment else "optimizer/step"
    return {"scale": "loop/scale", "streak": "loop/scale_streak"}[keys[0]]
