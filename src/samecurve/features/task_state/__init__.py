"""Attributes of a task that change as it trains, as a margin that grows: a checkpoint has them, and
a resumed run goes on with them.
"""

from samecurve.core.config import Section
from samecurve.core.feature import Feature


class TaskStateFeature(Feature[Section, None]):
    """The feature. Every run of a user's code has it, so no key of a plan has it."""

    order = 30
    changes_results = False
    brought_by = ("users' code",)
    hooks = ("torch",)


FEATURE = TaskStateFeature()
