"""A scale of the loss in f16, which keeps gradients within the range of the number format: halved
after a gradient that is not finite, doubled after many that are.

Engine jax has it in the program of its step.
"""

from samecurve.core.config import Section
from samecurve.core.feature import Feature


class LossScaleFeature(Feature[Section, None]):
    """The feature. Precision f16 brings it, so no key of a plan has it."""

    order = 10
    brought_by = ("f16",)
    hooks = ("torch",)


FEATURE = LossScaleFeature()
