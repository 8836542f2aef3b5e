"""Complex numbers as pairs of real ones: in parameters, optimizer state and sums over devices.

jax.grad of a real loss L by a complex z = x + iy gives dL/dx - i dL/dy, the conjugate of the
direction of steepest ascent (torch gives dL/dx + i dL/dy): descending along that diverges. With z
as the pair (x, y) the gradient is (dL/dx, dL/dy) under both engines, moments and norms are those of
real numbers, and every collective supports the type.
"""

import jax
import jax.numpy as jnp
from jax import lax

from samecurve.jax_engine.array_types import HostArray, PyTree


def is_complex(leaf: jax.Array | jax.ShapeDtypeStruct | HostArray) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.complexfloating))


def split(leaf: jax.Array) -> jax.Array:
    """[...] complex -> [..., 2] real; a real array is returned unchanged."""
    return jnp.stack([leaf.real, leaf.imag], axis=-1) if is_complex(leaf) else leaf


def join(pair: jax.Array) -> jax.Array:
    """[..., 2] real -> [...] complex."""
    return lax.complex(pair[..., 0], pair[..., 1])


def psum(tree: PyTree, axis: str) -> PyTree:
    """The sum over a mesh axis of every leaf of a tree; complex leaves travel as pairs."""
    sums = lax.psum(jax.tree.map(split, tree), axis)
    return jax.tree.map(lambda leaf, total: join(total) if is_complex(leaf) else total, tree, sums)
