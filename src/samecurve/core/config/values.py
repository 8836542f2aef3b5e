"""Config values that are written in more than one way: durations, sizes, speeds."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PlainValidator, PositiveFloat

from samecurve.units import parse_bytes

EPOCHS_PATTERN = r"^\d+(\.\d+)?ep$"
SIZE_PATTERN = r"^\d+(\.\d+)?\s*[KMGTP]?i?B$"


def _duration(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(EPOCHS_PATTERN, value):
        return value
    raise ValueError("must be a number of steps (500) or of epochs (2ep)")


_DURATION_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": EPOCHS_PATTERN}]
}
Duration = Annotated[
    int | str, PlainValidator(_duration), Field(json_schema_extra=cast("Any", _DURATION_SCHEMA))
]


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        return parse_bytes(value)
    raise ValueError("must be a number of bytes, or a size such as 40GiB or 80GB")


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": SIZE_PATTERN},
    ]
}
Size = Annotated[int, PlainValidator(_size), Field(json_schema_extra=cast("Any", _SIZE_SCHEMA))]


def _balance(value: object) -> str | tuple[float, ...]:
    """A list may be written as on a command line: 2,1."""
    if isinstance(value, str) and value in {"even", "measured"}:
        return value
    parts: Sequence[Any] = []
    if isinstance(value, str):
        parts = _numbers(value.split(","))
    elif isinstance(value, list | tuple):
        parts = value
    if not parts or not all(
        isinstance(part, int | float) and not isinstance(part, bool) and 0 < part < math.inf
        for part in parts
    ):
        raise ValueError("must be even, measured, or a relative speed for each device: [2, 1]")
    return tuple(map(float, parts))


def _numbers(texts: Sequence[str]) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []


Balance = Annotated[
    Literal["even", "measured"] | tuple[PositiveFloat, ...], BeforeValidator(_balance)
]
