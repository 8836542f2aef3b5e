"""Train one model on one device or on many, with the same loss curve.

plan, train and Run serve scripts and notebooks; Mean and Initial are what a task of one's own is written with. Importing them imports no engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.api import Run as Run
    from lockstep.api import plan as plan
    from lockstep.api import train as train
    from lockstep.core.initial import Initial as Initial
    from lockstep.core.mean import Mean as Mean

    load: Callable[[Any], Any]  # only named here: an import of launch would be one of all rooms, which import this module

__version__ = "0.1.0"
__all__ = ["Initial", "Mean", "Run", "__version__", "load", "plan", "train"]

_ROOMS = {"Initial": "lockstep.core.initial", "Mean": "lockstep.core.mean", "load": "lockstep.launch.weights", **dict.fromkeys(("Run", "plan", "train"), "lockstep.api")}


def __getattr__(name: str) -> Any:
    """Imported when asked for, so that `import lockstep` costs nothing."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_ROOMS[name]), name)
