"""The fused kernel in engine jax."""

from flax import nnx

from samecurve.jax_engine.attention import fuse_attention
from samecurve.jax_engine.feature_hooks import JaxHooks


class Hooks(JaxHooks):
    """Has a kernel of cuDNN compute the attention of our models."""

    def prepare(self, model: nnx.Module) -> None:
        fuse_attention(model)
