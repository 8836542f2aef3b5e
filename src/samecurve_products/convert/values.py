"""Functions that the tables of all tools name: conditions on a field's value, and conversions."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from samecurve_products.convert.foreign_config import SAME

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "given": lambda value: value is not None,  # the field is in the file
    "on": bool,  # it is in the file, and neither false, 0 nor empty
    "text": lambda value: isinstance(value, str),  # a text
    "words": lambda value: isinstance(value, str) and value != "",  # a text that is not empty
    "mapping": lambda value: isinstance(value, dict),  # a section of its own
    "positive": lambda value: isinstance(value, int) and value > 0,  # an integer above 0
    "as_text": str,  # the value as a text
    "single_file": lambda value: str(value).endswith(".safetensors"),  # a checkpoint in one file
}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is a number, and no switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_float(value: object) -> object:
    """A number as one with a point: 16 -> 16.0. Other values stay as they are."""
    return float(value) if is_number(value) else value


def number(value: object) -> object:
    """The number that a text holds: `2e-5` without a point is a text in YAML, and the tools that
    are read here take it for a number all the same.
    """
    try:
        return float(value) if isinstance(value, str) else SAME
    except ValueError:
        return SAME


def epochs(count: object) -> str:
    """A number of epochs as our config writes it: 2 -> '2ep'. Other values stay as they are."""
    if isinstance(count, int | float) and not isinstance(count, bool) and count >= 0:
        return f"{count:.9g}ep"
    return str(count)
