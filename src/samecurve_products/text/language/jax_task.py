"""The language task with jax, and its model: the decoder of torch_task.py in flax.

Checkpoints pass between the two: names, matrix layouts ([out, in]) and arithmetic are the same.
Everything is computed in the parameters' own type; with `narrow` products are computed in that
type, while norms and the residual stream stay in the parameters' type, as under torch's autocast.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from samecurve.jax_engine.attention import FusibleAttention
from samecurve.seam import IGNORED, Arrays, Mean
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.task import LanguageTask, NextLogits

_NARROW_DTYPES = (jnp.bfloat16, jnp.float16)


def rotary(length: int, head_size: int, theta: float, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [length, head_size] of position times theta^(-2i/d).

    The two halves of a head are rotated against each other.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    rates = theta ** (-jnp.arange(0, head_size, 2, dtype=wide) / head_size)
    angles = jnp.arange(length, dtype=wide)[:, None] * rates
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary positions to x [batch, length, heads, head_size]."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, narrow: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.narrow = narrow

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x, self.weight[...], self.narrow)


def product(x: jax.Array, weight: jax.Array, narrow: Any) -> jax.Array:
    """The product of x [..., in] and weight [out, in]: [..., out]."""
    if narrow:
        x, weight = x.astype(narrow), weight.astype(narrow)
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


class Norm(nnx.Module):
    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.eps) * self.weight[...]


class Attention(FusibleAttention):
    def __init__(self, fields: LanguageModel, narrow: Any) -> None:
        self.heads, self.groups, self.size = fields.num_heads, fields.groups, fields.head_size
        width = self.heads * self.size
        self.q_proj = Linear(fields.hidden_size, width, narrow)
        self.k_proj = Linear(fields.hidden_size, self.groups * self.size, narrow)
        self.v_proj = Linear(fields.hidden_size, self.groups * self.size, narrow)
        self.o_proj = Linear(width, fields.hidden_size, narrow)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, _ = x.shape

        def split(y: jax.Array, heads: int) -> jax.Array:
            return y.reshape(batch, length, heads, self.size)

        q = split(self.q_proj(x), self.heads)
        k = split(self.k_proj(x), self.groups)
        v = split(self.v_proj(x), self.groups)
        q, k = rotate(q, cos, sin).astype(v.dtype), rotate(k, cos, sin).astype(v.dtype)
        y = self.attend(q, k, v, causal=True)
        return self.o_proj(y.reshape(batch, length, -1))


class FeedForward(nnx.Module):
    def __init__(self, fields: LanguageModel, narrow: Any) -> None:
        self.gate_proj = Linear(fields.hidden_size, fields.inner, narrow)
        self.up_proj = Linear(fields.hidden_size, fields.inner, narrow)
        self.down_proj = Linear(fields.inner, fields.hidden_size, narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, fields: LanguageModel, narrow: Any) -> None:
        self.input_layernorm = Norm(fields.hidden_size, fields.norm_eps)
        self.self_attn = Attention(fields, narrow)
        self.post_attention_layernorm = Norm(fields.hidden_size, fields.norm_eps)
        self.mlp = FeedForward(fields, narrow)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nnx.Module):
    def __init__(self, vocab: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...].at[tokens].get(mode="clip")


class Decoder(nnx.Module):
    """Tokens [batch, length] -> logits [batch, length, vocab].

    narrow: the type that products are computed in; None: the parameters' type.
    """

    def __init__(self, fields: LanguageModel, vocab: int, narrow: Any = None) -> None:
        self.fields, self.narrow = fields, narrow
        self.embed_tokens = Embedding(vocab, fields.hidden_size)
        self.layers = nnx.List([Block(fields, narrow) for _ in range(fields.num_layers)])
        self.norm = Norm(fields.hidden_size, fields.norm_eps)
        self.lm_head = None if fields.tie_embeddings else Linear(fields.hidden_size, vocab, narrow)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.fields.head_size, self.fields.rope_theta, x.dtype)
        for block in self.layers:
            x = block(x, cos, sin)
        x = self.norm(x)
        if self.lm_head is None:
            return product(x, self.embed_tokens.weight[...], self.narrow)
        return self.lm_head(x)


class JaxLanguage(LanguageTask):
    def model(self, dtype: Any) -> Decoder:
        """The decoder. dtype: the type that products are computed in."""
        return Decoder(self.fields, self.vocab, dtype if dtype in _NARROW_DTYPES else None)

    def leave_out(self, rows: Arrays, real: jax.Array) -> Arrays:
        """The batch with labels removed from the rows that do not count (real is False)."""
        return {**rows, "labels": jnp.where(real[:, None], rows["labels"], IGNORED)}

    def loss(self, model: Any, batch: Arrays) -> Mean:
        logits, real = _wide(model(batch["tokens"])), batch["labels"] != IGNORED
        return Mean(_cross_entropy(logits, batch["labels"], real), real.sum())

    def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
        logits, real = _wide(model(batch["tokens"])), batch["labels"] != IGNORED
        correct = (logits.argmax(-1) == batch["labels"]) & real
        return {
            "loss": Mean(_cross_entropy(logits, batch["labels"], real), real.sum()),
            "accuracy": Mean(correct.sum(), real.sum()),
        }

    def next_logits(self, model: Any) -> NextLogits:
        """The logits of the next token, by one compiled program for all lengths.

        The window is padded to the context's length; a causal model does not see the padding.
        """
        graph, params = nnx.split(model)

        def logits(ids: list[int]) -> NDArray[np.float64]:
            window = np.zeros(self.length, np.int32)
            window[: len(ids)] = ids
            return np.asarray(_last(graph, params, window, len(ids) - 1), np.float64)

        return logits


@partial(jax.jit, static_argnums=0)
def _last(graph: Any, params: Any, window: Any, at: int) -> jax.Array:
    """The logits after the token at this place. Compiled once for a model."""
    logits: jax.Array = nnx.merge(graph, params)(window[None])[0, at]
    return logits


def _wide(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _cross_entropy(logits: jax.Array, labels: jax.Array, real: jax.Array) -> jax.Array:
    """Cross-entropy, summed over the places that have a label."""
    picked = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - picked, 0).sum()
