"""The config's JSON Schema, for editors, and its table, for the docs: both made from the one tree
that is also obeyed.
"""

from collections.abc import Iterator
from typing import Any

from samecurve.core.config.sections import Registry, config_class


def json_schema(registry: Registry) -> dict[str, Any]:
    """One schema for each task, told apart by `task`."""
    schemas = [
        config_class(task, registry.sections(task)).model_json_schema() for task in registry.names()
    ]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Samecurve config"}
    return {**head, **(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})}


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


def _rows(
    schema: dict[str, Any], definitions: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    for name, field in schema.get("properties", {}).items():
        inner = definitions.get(str(field.get("$ref", "")).rpartition("/")[2])
        if inner and "properties" in inner:
            yield from _rows(inner, definitions, f"{prefix}{name}.")
            continue
        default = "" if field.get("default") is None else f"`{_plain(field['default'])}`"
        yield prefix + name, _kind(field), default, field.get("description", "")
        listed = definitions.get(str(field.get("items", {}).get("$ref", "")).rpartition("/")[2])
        if listed:
            yield from _rows(listed, definitions, f"{prefix}{name}[].")


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(
            dict.fromkeys(
                _kind(option) for option in field["anyOf"] if option.get("type") != "null"
            )
        )
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    if "pattern" in field:
        return "epochs (2ep)"
    if field.get("type") == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        return f"list of {_kind(items) or 'sections'}"
    return {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true, false",
    }.get(field.get("type", ""), "")


def _plain(value: Any) -> str:
    return (
        str(list(value) if isinstance(value, tuple) else value)
        .replace("True", "true")
        .replace("False", "false")
    )
