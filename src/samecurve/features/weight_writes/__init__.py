"""A watch in every step: a loss may read weights, and write into none."""

from samecurve.core.config.section import Section
from samecurve.core.feature import Feature


class WeightWritesFeature(Feature[Section, None]):
    """The feature. Every run has it, so no key of a plan has it."""

    order = 20
    changes_results = False
    brought_by = ("f64", "f32", "bf16", "f16")
    hooks = ("torch",)


FEATURE = WeightWritesFeature()
