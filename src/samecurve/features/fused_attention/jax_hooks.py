"""The fused kernel in engine jax."""

from samecurve.jax_engine.feature_hooks import JaxHooks


class Hooks(JaxHooks):
    """Has the model built with the kernel."""

    fuses_attention = True
