"""The cost of a sample, as a plan needs it, counted by JAX without computing anything."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_ROWS = (1, 3)  # what grows from the one to the other is a sample's, not the weights'


def sample_costs(make_model: Callable[[], nnx.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    """Fields of Facts about what a sample costs. shape: of a sample's array"""
    graph, state = nnx.split(nnx.eval_shape(make_model))

    def loss(state: Any, images: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graph, state)
        total: jax.Array = model(images).astype(jnp.float32).sum()
        return total

    def kept(state: Any, images: jax.Array) -> Any:
        return jax.vjp(lambda state: loss(state, images), state)[1]

    counted = []
    for rows in _ROWS:
        images = jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
        residuals = jax.tree.leaves(jax.eval_shape(kept, state, images))
        lowered = jax.jit(jax.grad(loss)).lower(state, images)
        costs: Mapping[str, float] = lowered.cost_analysis() or {}
        counted.append((sum(leaf.size * leaf.dtype.itemsize for leaf in residuals), costs["flops"]))
    (few_bytes, few_flops), (many_bytes, many_flops) = counted
    more = _ROWS[1] - _ROWS[0]
    return {
        "bytes_per_sample": (many_bytes - few_bytes) // more,
        "flops_per_sample": (many_flops - few_flops) / more,
        "formulas": {
            "flops": "those of a forward and a backward pass, counted by JAX in its program",
            "bytes_per_sample": "what the model keeps of a row for its backward pass, as JAX says",
        },
    }
