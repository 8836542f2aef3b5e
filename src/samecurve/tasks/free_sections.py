"""The `model` and `data` sections of a task that declares none: any fields."""

import math
from typing import Any

from pydantic import ConfigDict, model_validator

from samecurve.core.config.section import Section
from samecurve.core.config.sections import DataSection


def check_finite(value: Any) -> None:
    """ValueError: a number within dicts and lists is infinite, or no number."""
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
    """The `model` section of a class that declares none."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeModel":
        check_finite(self.model_extra)
        return self


class FreeData(DataSection):
    """The `data` section of a class that declares none."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeData":
        check_finite(self.model_extra)
        return self


def section_argument(section: Section) -> Section | dict[str, Any]:
    """A section as a task's class gets it: a declared one as it is, a free one as a dict."""
    if isinstance(section, FreeModel | FreeData):
        return dict(section.model_extra or {})
    return section
