"""A TOML file as plain values, each with its line.

Only other tools' configs are written in TOML; a config of ours is YAML or JSON. The standard
library's reader gives no places, so the lines of keys are found in the text.
"""

import re
import tomllib
from collections.abc import Iterator
from datetime import date, time
from typing import Any

from samecurve.errors import UserError

Key = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


def parse_toml(text: str, name: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """The values of a TOML text, and the place of each key that has one.

    name: of the file, for the places in errors

    UserError: the text is no valid TOML.
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.search(str(error))
        where = f"{name}:{found[1]}:{found[2]}" if found else name
        raise UserError(
            f"not valid TOML: {_PLACE.sub('', str(error))}",
            "check the quotes and brackets at this place",
            where,
        ) from None
    except RecursionError:
        raise UserError("nested too deep", "a config is a few levels deep", name) from None
    places: dict[Key, str] = {}
    for key, line, column in _places(text):
        if _is_there(value, key):  # or a line of a longer text looks like a key
            places.setdefault(key, f"{name}:{line}:{column}")
    return _plain(value), places


def _plain(value: Any) -> Any:
    """The value with texts in place of dates and times."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


def _places(text: str) -> Iterator[tuple[Key, int, int]]:
    """The key, line and column of each header and each line that sets a value."""
    above: Key = ()
    counts: dict[Key, int] = {}  # tables of each array so far
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            parts = _within_arrays(_parts(header[2]), counts, new=header[1] == "[[")
            above = parts
            yield above, number, header.start(1) + 1
            continue
        found = _KEY.match(line)
        if found:
            yield (*above, *_parts(found[1])), number, found.start(1) + 1


def _within_arrays(parts: Key, counts: dict[Key, int], *, new: bool) -> Key:
    """The key with the number of the current table after each name of an array.

    new: the last name begins another table of its array
    """
    key: Key = ()
    for depth, part in enumerate(parts):
        key = (*key, part)
        if new and depth == len(parts) - 1:
            counts[key] = counts.get(key, -1) + 1
        if key in counts:
            key = (*key, counts[key])
    return key


def _parts(dotted: str) -> Key:
    """The names of a dotted key, without their quotes."""
    return tuple(
        part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted)
    )


def _is_there(value: Any, key: Key) -> bool:
    for part in key:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True
