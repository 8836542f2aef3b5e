"""nnx.Dropout and nnx.MultiHeadAttention with masks that follow the sample.

A mask is a pure function of (row key, seed, module name, call, element);
torch_engine/randomness/dropout_layers.py has the rule and keyed_numbers.py the lanes. A Dropout of
the same name drops the same elements under either engine.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights
from flax.nnx.nn.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name

from samecurve.core.sample_numbers import current_numbers
from samecurve.errors import UserError
from samecurve.jax_engine.array_types import Shape
from samecurve.jax_engine.sample_numbers import JaxSampleNumbers

_LANES = 65536
_MARK = "samecurve dropout: "  # before the name of a mask in a traced program
_LOOPS = {"scan", "while"}  # jax's primitives whose body runs several times


def dropout_names(model: nnx.Module) -> tuple[str, ...]:
    """Names of the layers that drop something in training."""
    return tuple(name for name, _ in _dropouts(model))


def key_dropout(model: nnx.Module, seed: int) -> None:
    """Let each layer of a model that drops something draw its masks from the rows in work.

    Their own generators are dropped.

    UserError: a layer stands for several (nnx.vmap, nnx.scan), or all samples share its mask.
    """
    for name, module in _dropouts(model):
        _refuse_unlike(name, module)
        kind: Any = type(module)
        if isinstance(module, nnx.MultiHeadAttention):
            module.__class__ = _keyed(kind, KeyedAttention)
            module.attention_fn = KeyedWeights(Masks(name, seed, module.dropout_rate))
        else:
            module.__class__ = _keyed(kind, KeyedDropout)
            module.samecurve_masks = Masks(name, seed, module.rate)
        module.rngs = nnx.data(None)


def _dropouts(model: nnx.Module) -> list[tuple[str, Any]]:
    layers: list[tuple[str, Any]] = [
        (".".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if _rate(module) > 0
    ]
    return [(name, layer) for name, layer in layers if not layer.deterministic]


def _rate(module: Any) -> float:
    """The share that a layer drops; 0 of other modules."""
    if isinstance(module, nnx.Dropout):
        return float(module.rate)
    return float(module.dropout_rate) if isinstance(module, nnx.MultiHeadAttention) else 0.0


def _kind(module: Any) -> str:
    return "Dropout" if isinstance(module, nnx.Dropout) else "MultiHeadAttention"


def _refuse_unlike(name: str, module: Any) -> None:
    """UserError: masks of this layer can't follow the samples."""
    keys = jax.tree.leaves(nnx.state(module, nnx.RngKey))
    if any(key.shape for key in keys):
        raise UserError(
            f"{_kind(module)} {name} stands for the layers of a stack (nnx.vmap or nnx.scan), which"
            " would all drop the same elements",
            f"an nnx.List of the layers, each with a {_kind(module)} of its own",
            "task",
        )
    if isinstance(module, nnx.MultiHeadAttention):
        _refuse_attention(name, module)
    elif 0 in module.broadcast_dims:
        raise UserError(
            f"Dropout {name} has broadcast_dims 0: all samples of a device would share one mask",
            "broadcast_dims without 0, so that each sample has a mask of its own",
            "task",
        )


def _refuse_attention(name: str, module: nnx.MultiHeadAttention) -> None:
    if module.broadcast_dropout:
        raise UserError(
            f"MultiHeadAttention {name} has broadcast_dropout: all samples of a device, and all"
            " heads, would share one mask",
            "nnx.MultiHeadAttention(..., broadcast_dropout=False), so that each sample has a mask"
            " of its own",
            "task",
        )
    if module.attention_fn is not nnx.dot_product_attention:
        raise UserError(
            f"MultiHeadAttention {name} has an attention_fn of its own, whose masks can't follow"
            " the samples",
            "leave attention_fn out; or dropout_rate=0, and drop inside it by samecurve.rng(batch)",
            "task",
        )


@dataclass(frozen=True)
class Masks:
    """The masks of a layer. rate: the share that they drop"""

    name: str
    seed: int
    rate: float

    def factors(self, kind: str, shape: Shape, shared: frozenset[int] = frozenset()) -> jax.Array:
        """What the next call of the layer multiplies with: 0, or what keeps the mean.

        kind: of the layer, for messages. shared: dimensions along which the mask is the same

        UserError: no microbatch is in work, or its samples are not first in the shape.
        """
        dropped = min(max(round(_LANES * self.rate), 1), _LANES - 1)
        lanes = self._lanes(kind, shape, shared)
        kept = checkpoint_name(lanes >= dropped - _LANES // 2, f"{_MARK}{kind} {self.name}")
        return jnp.where(kept, _LANES / (_LANES - dropped), 0.0)

    def _lanes(self, kind: str, shape: Shape, shared: frozenset[int]) -> jax.Array:
        """int16, uniform, in the shape but for the dimensions that share a mask."""
        numbers = current_numbers()
        if not isinstance(numbers, JaxSampleNumbers):
            raise UserError(
                f"{kind} {self.name} is called, and no microbatch is in work",
                "call the model in loss() or metrics(), or after model.eval()",
                "task",
            )
        sizes = tuple(1 if dim in shared else size for dim, size in enumerate(shape))
        rows = numbers.rows
        if not sizes or sizes[0] % rows:
            raise UserError(
                f"{kind} {self.name} is given {list(shape)} for {rows} samples, so its"
                " mask can't follow the samples",
                "samples first, each with equally many neighbouring rows; or leave it out: rate 0",
                "task",
            )
        lanes = numbers.lanes(self.seed, self.name, (sizes[0] // rows, *sizes[1:]))
        return lanes.reshape(sizes)


class KeyedDropout(nnx.Dropout):
    """A Dropout whose masks follow the sample, whatever generator it is given."""

    samecurve_masks: Masks

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        del rngs
        if self.deterministic if deterministic is None else deterministic:
            return inputs
        if self.rate == 1:
            return jnp.zeros_like(inputs)
        shared = frozenset(dim % inputs.ndim for dim in self.broadcast_dims)
        return dropped(inputs, self.samecurve_masks.factors("Dropout", inputs.shape, shared))


def dropped(inputs: jax.Array, factors: jax.Array) -> jax.Array:
    """The inputs times a mask's factors, in their type; rounded once, as torch does."""
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    return (inputs.astype(wide) * factors.astype(wide)).astype(inputs.dtype)


class KeyedAttention(nnx.MultiHeadAttention):
    """A MultiHeadAttention whose masks follow the sample, whatever generator it is given."""

    def __call__(self, *inputs: Any, rngs: Any = None, **options: Any) -> jax.Array:
        del rngs
        generator: Any = _no_generator
        attended: jax.Array = super().__call__(*inputs, rngs=generator, **options)
        return attended


def _no_generator() -> None:
    """In place of a generator, which KeyedWeights does not need."""


@dataclass(frozen=True)
class KeyedWeights:
    """flax's dot_product_attention, with the dropout of its weights by masks of the samples."""

    masks: Masks

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        deterministic: bool,
        dtype: Any,
        precision: Any,
        **options: Any,
    ) -> jax.Array:
        """query: [samples, ..., places, heads, size]. options: those of flax's function"""
        settings = {**options, "dtype": dtype, "precision": precision}
        if deterministic:
            whole: jax.Array = nnx.dot_product_attention(
                query, key, value, deterministic=True, **settings
            )
            return whole
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        weights = dot_product_attention_weights(query, key, deterministic=True, **settings)
        factors = self.masks.factors("MultiHeadAttention", weights.shape)
        groups = query.shape[-2] // value.shape[-2]
        return jnp.einsum(
            "...hqk,...khd->...qhd",
            dropped(weights, factors),
            jnp.repeat(value, groups, axis=-2),
            precision=precision,
        )


@cache
def _keyed(kind: Any, keyed: Any) -> Any:
    """A subclass of a layer's class, so that isinstance() gives what it gave before."""
    if issubclass(kind, keyed):
        return kind
    return type(f"Keyed{kind.__name__}", (keyed, kind), {"__module__": __name__})


def refuse_repeated_masks(jaxpr: Any) -> None:
    """UserError: a mask is drawn in a loop of the program, each turn of which would repeat it."""
    name = _looped_mask(jaxpr, in_loop=False)
    if name is not None:
        raise UserError(
            f"{name} is called in a loop that jax compiles (lax.scan, nnx.scan, RNN): each"
            " turn would drop the same elements",
            "drop before or after the loop, or unroll it: an nnx.List of layers and a for loop",
            "task",
        )


def _looped_mask(jaxpr: Any, *, in_loop: bool) -> str | None:
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        name = str(equation.params.get("name", ""))
        if in_loop and kind == "name" and name.startswith(_MARK):
            return name.removeprefix(_MARK)
        for inner in jax.core.jaxprs_in_params(equation.params):
            looped = _looped_mask(inner, in_loop=in_loop or kind in _LOOPS)
            if looped is not None:
                return looped
    return None
