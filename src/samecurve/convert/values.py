"""Functions that the tables of all tools name: conditions on a field's value, and conversions."""

from samecurve.convert.foreign_config import SAME


def given(value: object) -> bool:
    """Whether the field is in the file."""
    return value is not None


def on(value: object) -> bool:
    """Whether the field is in the file, and neither false, 0 nor empty."""
    return bool(value)


def text(value: object) -> bool:
    """Whether the field is a text."""
    return isinstance(value, str)


def words(value: object) -> bool:
    """Whether the field is a text that is not empty."""
    return isinstance(value, str) and value != ""


def mapping(value: object) -> bool:
    """Whether the field is a section of its own."""
    return isinstance(value, dict)


def positive(value: object) -> bool:
    """Whether the field is an integer above 0."""
    return isinstance(value, int) and value > 0


def as_text(value: object) -> str:
    """The value as a text."""
    return str(value)


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
