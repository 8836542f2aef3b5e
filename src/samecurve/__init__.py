"""Train one model on one device or on many, with the same loss curve.

plan, train, verify and Run serve scripts and notebooks. Mean, Initial, Section, DataSection, rng
and sample_rng are what a user task is written with; TaskEntry is what an installed package names
its tasks by. Importing them imports no engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from samecurve.api import Run as Run
    from samecurve.api import plan as plan
    from samecurve.api import train as train
    from samecurve.api import verify as verify
    from samecurve.core.config import Section as Section
    from samecurve.core.config.sections import DataSection as DataSection
    from samecurve.core.determinism import Mean as Mean
    from samecurve.core.determinism.sample_keys import sample_rng as sample_rng
    from samecurve.core.protocols import Initial as Initial
    from samecurve.core.sample_numbers import rng as rng
    from samecurve.data.shards.source import Shards as Shards

    # only named here: an import of their rooms would be one of all rooms, which import this module
    TaskEntry: type[Any]
    load: Callable[..., Any]

__version__ = "0.2.0"
__all__ = [
    "DataSection",
    "Initial",
    "Mean",
    "Run",
    "Section",
    "Shards",
    "TaskEntry",
    "__version__",
    "load",
    "plan",
    "rng",
    "sample_rng",
    "train",
    "verify",
]

_ROOMS = {
    "DataSection": "samecurve.core.config.sections",
    "Initial": "samecurve.core.protocols",
    "Mean": "samecurve.core.determinism",
    "Section": "samecurve.core.config",
    "Shards": "samecurve.data.shards.source",
    "TaskEntry": "samecurve.tasks",
    "load": "samecurve.run.weights.trained_model",
    "rng": "samecurve.core.sample_numbers",
    "sample_rng": "samecurve.core.determinism.sample_keys",
    **dict.fromkeys(("Run", "plan", "train", "verify"), "samecurve.api"),
}


def __getattr__(name: str) -> Any:
    """Imported when asked for, so that `import samecurve` costs nothing."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_ROOMS[name]), name)
