"""Buffers that a forward pass moves whatever its rows are: an estimate of a weight's norm
(spectral_norm), a count of steps. They move once a step, however many microbatches the step has.

The split check finds them before the first step, so a plan does not know of them.
"""

from samecurve.core.config import Section
from samecurve.core.feature import Feature


class StepBuffersFeature(Feature[Section, None]):
    """The feature. The split check brings it, with the buffers' names."""

    order = 100
    brought_by = ("steady buffers",)
    hooks = ("torch",)


FEATURE = StepBuffersFeature()
