"""The config's JSON Schema, for editors, and its table, for the docs: both made from the one tree
that is also obeyed.
"""

from collections.abc import Iterator
from typing import Any

from samecurve.core.config.sections import Registry, config_class
from samecurve.core.config.values import EPOCHS_PATTERN, SIZE_PATTERN

Schema = dict[str, Any]  # JSON Schema
# what is written as a text of its own form: pattern -> its kind, with an example
_WRITTEN = {EPOCHS_PATTERN: "epochs (2ep)", SIZE_PATTERN: "size (40GiB)"}


def json_schema(registry: Registry) -> Schema:
    """One schema for each task, told apart by `task`."""
    schemas = [
        config_class(task, registry.sections(task)).model_json_schema() for task in registry.names()
    ]
    tasks = {"anyOf": schemas}
    if len(schemas) == 1:
        tasks = schemas[0]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Samecurve config",
        **tasks,
    }


def as_table(registry: Registry) -> str:
    """Every key with its type, default and meaning, as Markdown."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for task in registry.names():
        schema = config_class(task, registry.sections(task)).model_json_schema()
        rows += [
            f"| `{key}` | {kind} | {default} | {meaning} |"
            for key, kind, default, meaning in _rows(schema, schema.get("$defs", {}), "")
        ]
    return "\n".join(rows)


def _rows(schema: Schema, definitions: Schema, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        inner = definitions.get(str(field.get("$ref", "")).rpartition("/")[2])
        if inner and "properties" in inner:
            yield from _rows(inner, definitions, f"{prefix}{name}.")
            continue
        default = field.get("default")
        shown = "" if default is None else f"`{_plain(default)}`"
        yield prefix + name, _kind(field), shown, field.get("description", "")
        listed = definitions.get(str(field.get("items", {}).get("$ref", "")).rpartition("/")[2])
        if listed:
            yield from _rows(listed, definitions, f"{prefix}{name}[].")


def _kind(field: Schema) -> str:
    if "anyOf" in field:
        options = [option for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    if field.get("pattern") in _WRITTEN:
        return _WRITTEN[field["pattern"]]
    if field.get("type") == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items) or 'sections'}"
    return {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true, false",
    }.get(field.get("type", ""), "")


def _plain(value: object) -> str:
    """As one writes it in a config file."""
    if isinstance(value, tuple):
        value = list(value)
    return str(value).replace("True", "true").replace("False", "false")
