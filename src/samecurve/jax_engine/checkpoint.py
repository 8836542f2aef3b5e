"""A training state as one tree of arrays, and the canonical names under which a checkpoint holds
it: those of torch_engine/checkpoint.py.

{"params": {name: array}, "frozen": likewise, what is not trained, "moments": optax's own, "scale":
f16's factor, "streak": finite steps since it last changed}
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from samecurve.core.config.param_groups import ParamRule
from samecurve.core.config.sections import Optimizer
from samecurve.core.protocols import ArrayShard, Checkpoint, arrays_to_write
from samecurve.core.weight_check import check_finite, check_fit, check_weights
from samecurve.jax_engine.model import FlaxModel, InitialValue
from samecurve.jax_engine.strategies import ReadPart, Strategy

State = dict[str, Any]
INITIAL_SCALE = 2.0**16
_SLOTS = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "trace": "momentum_buffer",
}  # optax's names -> torch's
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "int32": "F32",
}  # as a file has them: torch counts steps in float32
_LONE = {"optimizer/step", "loop/scale", "loop/scale_streak"}  # what a checkpoint may lack


def make_optimizer(
    fields: Optimizer, rules: Mapping[str, ParamRule]
) -> optax.GradientTransformation:
    """What is to be taken off the weights, times the learning rate: torch's AdamW and SGD.

    rules: of what is trained, by name.
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
    return optax.chain(
        *decay, optax.trace(fields.momentum)
    )  # torch adds sgd's decay to the gradient


def all_params(state: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of a state, or what its tree has in their place."""
    return {**state["frozen"], **state["params"]}


@dataclass(frozen=True)
class Entry:
    """One leaf of a state. name: canonical. shape: of the whole array."""

    name: str
    shape: tuple[int, ...]


class StateLayout:
    """Where the leaves of a state lie, and what each is called.

    trained: how, by name. UserError: a group of the config rules nothing.
    """

    def __init__(
        self, model: FlaxModel, fields: Optimizer, strategy: Strategy, half: bool, dtype: Any
    ) -> None:
        self._strategy, self._loss_scaled = strategy, half
        fields.rules.check_names(model.specs)
        rules = {
            name: fields.rules.rule_for(name, spec.matrix) for name, spec in model.specs.items()
        }
        self.trained = {name: rule for name, rule in rules.items() if not rule.frozen}
        params, frozen = (
            {
                name: jax.ShapeDtypeStruct(spec.shape, dtype)
                for name, spec in model.specs.items()
                if (name in self.trained) == trained
            }
            for trained in (True, False)
        )
        number = jax.ShapeDtypeStruct((), dtype)
        self.transform = make_optimizer(fields, self.trained)
        outline = {
            "params": params,
            "frozen": frozen,
            "moments": jax.eval_shape(self.transform.init, params),
            "scale": number,
            "streak": number,
        }
        leaves, tree = jax.tree_util.tree_flatten_with_path(outline)
        self._tree: Any = tree
        self._entries = [Entry(_name(path), tuple(leaf.shape)) for path, leaf in leaves]
        self._dtypes = [leaf.dtype for _, leaf in leaves]

    @property
    def specs(self) -> State:
        """The state's tree of partition specs."""
        found: State = self._tree.unflatten(
            [self._strategy.spec(entry.shape) for entry in self._entries]
        )
        return found

    def init(self, value: InitialValue, weights: Checkpoint | None = None) -> State:
        """A state whose moments are zero.

        weights: of the model, instead of its initial values. UserError: they don't fit.
        """
        if weights:
            wanted = {
                entry.name: entry.shape
                for entry in self._entries
                if entry.name.startswith("model/")
            }
            check_weights(
                {name: weights.arrays.shape(name) for name in weights.arrays},
                wanted,
                (),
                weights.path,
            )

        def part(entry: Entry) -> ReadPart:
            if not entry.name.startswith("model/"):
                return self._zero(entry)
            if weights and entry.name in weights.arrays:
                return partial(weights.arrays.part, entry.name)
            whole = value(entry.name.removeprefix("model/"))
            return lambda offsets, shape: whole[
                tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
            ]

        return self._make(part)

    def restore(self, saved: Checkpoint) -> State:
        """From a checkpoint made by any engine, precision, strategy or world.

        UserError: names or shapes that don't fit.
        """
        wanted = {entry.name: entry.shape for entry in self._entries}
        check_fit(saved, wanted, _LONE)

        def part(entry: Entry) -> ReadPart:
            return (
                (lambda offsets, shape: saved.arrays.part(entry.name, offsets, shape))
                if entry.name in saved.arrays and self._is_stored(entry.name)
                else self._zero(entry)
            )

        return self._make(part)

    def gather(
        self, state: State, finite: Sequence[bool], process: int, processes: int
    ) -> list[ArrayShard]:
        """Copies in host memory of what this process writes.

        finite: what finite() found. RunError: an array is not.
        """
        check_finite(
            [entry.name for entry, sound in zip(self._entries, finite, strict=True) if not sound]
        )
        sizes = {
            entry.name: array.nbytes
            for entry, array in self._stored_entries(state)
            if array.is_fully_replicated
        }
        mine = set(arrays_to_write(sizes, processes, process))
        pieces = []
        for entry, array in self._stored_entries(state):
            if array.is_fully_replicated and entry.name not in mine:
                continue
            offsets, box = self._strategy.local_shard(array, entry.shape)
            if box.size:
                kind = _DTYPES[box.dtype.name]
                pieces.append(
                    ArrayShard(
                        entry.name,
                        kind,
                        entry.shape,
                        offsets,
                        box.astype(np.float32) if box.dtype == np.int32 else box,
                    )
                )
        return pieces

    def finite(self, state: State) -> jax.Array:
        """For each leaf whether all its values are; to be compiled."""
        return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)])

    def named_arrays(self, state: State) -> Iterator[tuple[str, jax.Array]]:
        """What a checkpoint holds of a state, by name."""
        return ((entry.name, array) for entry, array in self._stored_entries(state))

    def _stored_entries(self, state: State) -> Iterator[tuple[Entry, jax.Array]]:
        return (
            (entry, leaf)
            for entry, leaf in zip(self._entries, jax.tree.leaves(state), strict=True)
            if self._is_stored(entry.name)
        )

    def _is_stored(self, name: str) -> bool:
        return self._loss_scaled or not name.startswith("loop/")

    def _zero(self, entry: Entry) -> ReadPart:
        first = (INITIAL_SCALE if self._loss_scaled else 1.0) if entry.name == "loop/scale" else 0.0
        return lambda offsets, shape: np.full(shape, first)

    def _make(self, part: Any) -> State:
        leaves = [
            self._strategy.put(entry.shape, dtype, part(entry))
            for entry, dtype in zip(self._entries, self._dtypes, strict=True)
        ]
        found: State = self._tree.unflatten(leaves)
        return found


def _name(path: Any) -> str:
    """A leaf's canonical name."""
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if keys[0] in {"params", "frozen"}:
        return f"model/{keys[-1]}"
    if keys[0] == "moments":
        slot = next((_SLOTS[key] for key in keys if key in _SLOTS), None)
        return f"optimizer/{slot}/{keys[-1]}" if slot else "optimizer/step"
    return {"scale": "loop/scale", "streak": "loop/scale_streak"}[keys[0]]
