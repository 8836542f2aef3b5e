"""Attention of our flax models: by cuDNN's fused kernel where the plan says so, else with scores.

The fused kernel keeps no scores for the backward pass. It has not been run on a GPU yet.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class FusibleAttention(nnx.Module):
    """A module whose attention may be fused.

    size: of a head
    fused: whether it is: a feature sets it
    """

    size: int
    fused: bool = False

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False
    ) -> jax.Array:
        """What each place reads from the others; in the shape of the query.

        query: [rows, places, heads, size]. key, value: [rows, places, groups, size]; the heads are
            divided evenly among the groups
        causal: a place reads from itself and from earlier ones
        """
        if self.fused:
            attended: jax.Array = jax.nn.dot_product_attention(
                query, key, value, is_causal=causal, implementation="cudnn"
            )
            return attended
        return attend_with_scores(query, key, value, causal=causal)


def attend_with_scores(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Attention as FusibleAttention.attend(), in float32 at least between its two products."""
    rows, places, heads, size = query.shape
    groups = key.shape[2]
    grouped = query.reshape(rows, places, groups, heads // groups, size)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key) * size**-0.5
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((places, places), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bgrqk,bkgd->bqgrd", weights, value).reshape(query.shape)


def attention_head(model: nnx.Module) -> int | None:
    """The size of the largest head of attention that may be fused; None: there is none."""
    modules = (module for _, module in nnx.iter_modules(model))
    sizes = [module.size for module in modules if isinstance(module, FusibleAttention)]
    return max(sizes, default=None)


def fuse_attention(model: nnx.Module) -> None:
    """Let the fused kernel compute the model's attention."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, FusibleAttention):
            module.fused = True
