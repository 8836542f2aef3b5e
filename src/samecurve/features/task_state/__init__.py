"""What a task's code keeps in plain attributes, as a margin that grows: saved with a checkpoint, and
there again after a resume.
"""

from samecurve.core.config.section import Section
from samecurve.core.feature import Feature


class TaskStateFeature(Feature[Section, None]):
    """The feature. Every run has it, so no key of a plan has it."""

    order = 30
    changes_results = False
    precisions = ("f64", "f32", "bf16", "f16")
    hooks = ("torch",)


FEATURE = TaskStateFeature()
