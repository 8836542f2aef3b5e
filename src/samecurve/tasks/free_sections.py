"""`model` and `data` sections with any fields, for a task that declares none."""

import math
from typing import Any

from pydantic import ConfigDict, model_validator

from samecurve.core.config.section import Section
from samecurve.core.config.sections import DataSection


def check_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("should be finite numbers")
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    for item in inner:
        check_finite(item)


class FreeModel(Section):
    """Whatever the task's class reads."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeModel":
        check_finite(self.model_extra)
        return self


class FreeData(DataSection):
    """Whatever the task's class reads."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeData":
        check_finite(self.model_extra)
        return self
