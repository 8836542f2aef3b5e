"""What tests of other trainers' configs share: reading them, and loading what they become."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samecurve.core.config import flatten
from samecurve.core.config.document import parse_document, read_document
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.errors import InvalidConfigError, UserError
from samecurve.tasks import Tasks
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import convert


def read_values(value: Mapping[str, Any], folder: Path | None = None) -> ConvertedConfig:
    """A config given as values. folder: where the files lie that it names"""
    converted = convert(parse_document(json.dumps(value), "old.json"), folder)
    assert converted is not None
    return converted


def read_path(path: Path) -> ConvertedConfig:
    converted = convert(read_document(path), path.parent)
    assert converted is not None
    return converted


def set_flags(converted: ConvertedConfig, **flags: Any) -> None:
    """Set keys as --set would; data__source stands for data.source."""
    for key, value in flags.items():
        converted.document.set(key.replace("__", "."), value, f"--set {key}")


def loaded(converted: ConvertedConfig, **flags: Any) -> LoadedConfig:
    """The config, after these flags: nothing of it is refused, and our loader takes it."""
    set_flags(converted, **flags)
    assert list(map(str, converted.unresolved(converted.document))) == []
    return load_document(converted.document, Tasks())


def values_of(converted: ConvertedConfig, *keys: str, **flags: Any) -> dict[str, Any]:
    flat = flatten(loaded(converted, **flags).config)
    return {key: flat[key] for key in keys}


def refused(converted: ConvertedConfig) -> list[str]:
    """What is refused: by the conversion, and then by our loader."""
    errors: list[UserError] = converted.unresolved(converted.document)
    try:
        load_document(converted.document, Tasks())
    except InvalidConfigError as error:
        errors += error.errors
    return [str(error) for error in errors]


def check_every_field_is_named(converted: ConvertedConfig, names: set[str]) -> None:
    """Every field has one reading, in the lines and in the file that is written."""
    read = [row.field for row in converted.readings if not row.field.startswith("(")]
    assert len(read) == len(set(read))
    assert names <= set(read), names - set(read)
    text = converted.to_yaml("old")
    assert not [name for name in read if f"#   {name} " not in text]


def flat_names(value: Any, above: str = "") -> set[str]:
    """The dotted names of all fields within mappings, and within lists of mappings."""
    if isinstance(value, dict) and value:
        return set().union(*(flat_names(item, f"{above}{name}.") for name, item in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = enumerate(value)
        return set().union(*(flat_names(item, f"{above}{number}.") for number, item in rows))
    return {above.removesuffix(".")}
