"""The config's JSON Schema, for editors, and its table, for the docs.

Both are made from the classes that the program itself reads configs with.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from samecurve.core.config import EPOCHS_PATTERN, MINUTES_PATTERN, SIZE_PATTERN
from samecurve.core.config.document import SCHEMA_KEY
from samecurve.core.config.loading import DEFAULT_TASK, Registry, TaskSections, config_class
from samecurve.core.config.sections import FreeData, FreeModel
from samecurve.core.feature_list import listed

Schema = dict[str, Any]  # JSON Schema
_REF = "#/$defs/"
_OWN = "a class of your own"
_OWN_TASK = {
    "type": "string",
    "pattern": "^.+:[^:]+$",
    "title": "Task",
    "description": "path/to/file.py:MyTask or package.module:MyTask",
}
_TABLE_HEAD = ("| key | value | default | meaning |", "|---|---|---|---|")
# values with a syntax of their own: its pattern -> what the table calls it, with an example
_WRITTEN = {
    EPOCHS_PATTERN: "epochs (2ep)",
    MINUTES_PATTERN: "minutes (10min)",
    SIZE_PATTERN: "size (40GiB)",
}


def json_schema(registry: Registry) -> Schema:
    """The schema of all tasks, which differ in `task` and share definitions at the root.

    With several tasks, a class of the user's own, whose sections take any field, is one of them.
    """
    schemas = {task: _schema_of(registry, task) for task in registry.names()}
    if len(schemas) > 1:
        for task, schema in schemas.items():
            if task != DEFAULT_TASK:
                schema["required"] = ["task", *schema.get("required", ())]
        schemas[_OWN] = _schema_of_own_class()
    for schema in schemas.values():
        _finish(schema)
    definitions = {task: schema.pop("$defs", {}) for task, schema in schemas.items()}
    apart = _names_apart(list(definitions.values()))
    merged: Schema = {}
    for task, schema in schemas.items():
        prefix = re.sub(r"[^\w.-]", "_", task)
        new_names = {name: f"{prefix}.{name}" for name in apart}
        schemas[task] = _with_refs(schema, new_names)
        for name, definition in definitions[task].items():
            merged[new_names.get(name, name)] = _with_refs(definition, new_names)
    root = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if len(schemas) == 1:
        (schema,) = schemas.values()
        return {**root, "title": schema.pop("title"), "$defs": merged, **schema}
    return {
        **root,
        "title": "Samecurve config",
        "$defs": merged,
        "anyOf": list(schemas.values()),
    }


def as_table(registry: Registry) -> str:
    """Every key with its type, default and meaning, as Markdown.

    With several tasks, a table of their common keys comes first, then one of each task's own keys.
    """
    rows = {}
    for task in registry.names():
        schema = _schema_of(registry, task)
        rows[task] = [
            f"| `{key}` | {kind} | {default} | {meaning} |"
            for key, kind, default, meaning in _rows(schema, schema.get("$defs", {}), "")
        ]
    first, *others = rows.values()
    common = [row for row in first if all(row in other for other in others)]
    lines = [*_TABLE_HEAD, *common]
    if others:
        for task, own_rows in rows.items():
            lines += ["", f"`task: {task}`", "", *_TABLE_HEAD]
            lines += [row for row in own_rows if row not in common]
    return "\n".join(lines)


def _schema_of(registry: Registry, task: str) -> Schema:
    schema = config_class(task, registry.sections(task), listed()).model_json_schema()
    return {**schema, "title": f"Samecurve config, task {task}"}


def _schema_of_own_class() -> Schema:
    """The schema of a config whose task is a class that declares no sections."""
    schema = config_class(_OWN, TaskSections(FreeModel, FreeData), listed()).model_json_schema()
    schema["properties"]["task"] = _OWN_TASK
    required = ["task", *schema.get("required", ())]
    return {**schema, "title": f"Samecurve config, {_OWN}", "required": required}


def _finish(schema: Schema) -> None:
    """Allow what the loader allows: the key for editors, and no section where none is needed."""
    schema["properties"] = {
        SCHEMA_KEY: {"type": "string", "description": "for editors; Samecurve ignores it"},
        **schema["properties"],
    }
    for name in ("model", "data"):
        target = schema["properties"][name].get("$ref", "").rpartition("/")[2]
        if not schema["$defs"][target].get("required"):
            schema["required"].remove(name)


def _names_apart(definitions: list[Schema]) -> set[str]:
    """Names of definitions that differ between tasks, or that refer to such definitions."""
    apart: set[str] = set()
    texts: dict[str, str] = {}
    for task_definitions in definitions:
        for name, definition in task_definitions.items():
            text = json.dumps(definition, sort_keys=True)
            if texts.setdefault(name, text) != text:
                apart.add(name)
    reached = apart
    while reached:
        refs = [json.dumps(_REF + name) for name in reached]
        reached = {name for name, text in texts.items() if any(ref in text for ref in refs)}
        reached -= apart
        apart |= reached
    return apart


def _with_refs(part: Any, new_names: Mapping[str, str]) -> Any:
    """A part of a schema whose references follow the new names."""
    if isinstance(part, list):
        return [_with_refs(item, new_names) for item in part]
    if not isinstance(part, dict):
        return part
    part = {key: _with_refs(value, new_names) for key, value in part.items()}
    target = part.get("$ref")
    if isinstance(target, str):
        name = target.removeprefix(_REF)
        part["$ref"] = _REF + new_names.get(name, name)
    return part


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
    """The type of a field, as the table's column "value" names it."""
    if "anyOf" in field or "oneOf" in field:
        forms = field.get("anyOf") or field["oneOf"]
        options = [option for option in forms if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(_kind(option) or "a section" for option in options))
    if "enum" in field:
        words = (
            str(word).lower() if isinstance(word, bool) else str(word) for word in field["enum"]
        )
        return ", ".join(words)
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
    """A default as a config file has it."""
    if isinstance(value, tuple):
        value = list(value)
    return str(value).replace("True", "true").replace("False", "false")
