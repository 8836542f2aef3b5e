"""Blocks that run again in backward, in engine jax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from samecurve.jax_engine.complex_pairs import is_complex
from samecurve.jax_engine.feature_hooks import JaxHooks
from samecurve.jax_engine.model import blocks


class Hooks(JaxHooks):
    """Wraps the blocks of the model."""

    value: str

    def prepare(self, model: nnx.Module) -> None:
        recompute(model, self.value)


def recompute(model: nnx.Module, how: str) -> None:
    """Let each block run again in backward instead of keeping its activations. how: as
    train.recompute
    """
    policy = _keep_real_products if how == "selective" else None
    parts = blocks(model)
    classes = {kind: _recomputed_class(kind, policy) for kind in {type(part) for part in parts}}
    for part in parts:
        part.__class__ = classes[type(part)]


def _recomputed_class(kind: Any, policy: Callable[..., bool] | None) -> Any:
    """A class whose calls run again in backward."""

    def call(block: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        graph, state = nnx.split(block)
        pure = jax.checkpoint(
            lambda state, *args, **kwargs: kind.__call__(nnx.merge(graph, state), *args, **kwargs),
            policy=policy,
        )
        return pure(state, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def _keep_real_products(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Whether "selective" keeps a result: it keeps real products with weights.

    jax.checkpoint can't keep complex values (reduce_precision refuses them).
    """
    is_product: Callable[..., bool] = partial(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, primitive
    )
    return is_product(*inputs, **parameters) and not any(map(is_complex, inputs))
