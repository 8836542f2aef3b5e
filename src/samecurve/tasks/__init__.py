"""Tasks: a class says what is trained (protocol.py); engines see it through an adapter.

Importing this imports no engine; a task's class is imported where it is opened.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.tasks.registry import Tasks as Tasks
from samecurve.tasks.registry import entry_of as entry_of

if TYPE_CHECKING:  # numpy is not imported for a config error
    from samecurve.core.config.sections import Config
    from samecurve.tasks.adapter.engine_adapter import EngineAdapter


def open_task(config: "Config", cache: Path | str) -> "EngineAdapter":
    """The task of a config, its data ready in `cache`. Imports the engine's model code."""
    return entry_of(config.task).open(config, cache)
