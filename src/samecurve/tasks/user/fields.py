"""Free `model` and `data` sections, for the user's class to read. No engine is imported here."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, model_validator

from samecurve.core.config.section import Section
from samecurve.core.config.sections import DataFields, TaskFields


class Place(NamedTuple):
    """Where a task is: `path.py:name`."""

    path: Path
    name: str


def place_of(task: object) -> Place | None:
    """'my/file.py:MyTask' -> its file and class; None: of another form."""
    found = re.fullmatch(r"(.+\.py):([^\W\d]\w*)", task) if isinstance(task, str) else None
    return Place(Path(found[1]), found[2]) if found else None


def _finite(values: Any) -> None:
    if isinstance(values, float) and not math.isfinite(values):
        raise ValueError("should be finite numbers")
    for value in (
        values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    ):
        _finite(value)


class UserModel(Section):
    """Whatever the task's class reads."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "UserModel":
        _finite(self.model_extra)
        return self


class UserData(DataFields):
    """Whatever the task's class reads."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "UserData":
        _finite(self.model_extra)
        return self


FIELDS = TaskFields(UserModel, UserData)
