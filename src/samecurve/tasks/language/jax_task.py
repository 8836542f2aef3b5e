"""The language task with jax."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import Arrays
from samecurve.data import IGNORED
from samecurve.tasks.language.jax_model import Decoder
from samecurve.tasks.language.task import LanguageTask, NextLogits

_NARROW_DTYPES = (jnp.bfloat16, jnp.float16)


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
