"""The fields of a form, made from the JSON Schema of a task's config.

fields.yaml says which keys are basic for each task, and their labels, units and order; labels and
help texts that it lacks follow from the schema, which has the labels and units of features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypedDict

import yaml

from samecurve.core.config import EPOCHS_PATTERN, MINUTES_PATTERN, SIZE_PATTERN
from samecurve.core.config.document import SCHEMA_KEY
from samecurve.core.config.json_schema import Schema, json_schema
from samecurve.seam import Tasks, strategies_of
from samecurve.tasks import built_in

Kind = Literal[
    "number", "integer", "text", "choice", "switch", "list", "json", "path", "duration", "size"
]
_PLACEHOLDERS: Mapping[str, str] = {
    "size": "40GiB",
    "json": "{name: value}",
    "path": "a file or folder below the page's folders",
}
_SIMPLE: Mapping[str, Kind] = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "switch",
    "array": "list",
    "object": "json",
}


class Choice(TypedDict):
    value: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of the form.

    section: the key of the switch that must be on for the field to have a meaning; '': none
    is_section: the field is such a switch: a part of the config that may be absent
    """

    key: str
    label: str
    help: str
    kind: Kind
    default: Any
    nullable: bool = False
    choices: Sequence[Choice] = ()
    unit: str = ""
    placeholder: str = ""
    section: str = ""
    is_section: bool = False

    def to_json(self) -> dict[str, Any]:
        """The field as the browser gets it; what it has not is left out."""
        names = ("key", "label", "help", "kind", "default", "nullable")
        values = {name: getattr(self, name) for name in names}
        for name in ("choices", "unit", "placeholder", "section"):
            if getattr(self, name):
                values[name] = getattr(self, name)
        return values


@dataclass(frozen=True)
class Group:
    """Fields under one title."""

    title: str
    fields: Sequence[Field]
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"title": self.title}
        if self.text:
            values["text"] = self.text
        return {**values, "fields": [field.to_json() for field in self.fields]}


@dataclass(frozen=True)
class FormFields:
    """All fields of a task's configs: the basic ones, the others, and those of several devices."""

    groups: Sequence[Group]
    more: Sequence[Group]
    multi_gpu: Sequence[Field]
    by_key: Mapping[str, Field] = field(default_factory=dict)


@cache
def table() -> Mapping[str, Any]:
    """The content of fields.yaml."""
    text = (files("samecurve_products.page.form") / "fields.yaml").read_text(encoding="utf-8")
    values: Mapping[str, Any] = yaml.safe_load(text)
    return values


def form_fields(task: str, engine: str, extra: Mapping[str, Any]) -> FormFields:
    """The fields of a task's configs. UserError: the task's own sections can't be read.

    extra: keys that the base has and the schema does not name, with their values
    """
    schema = _schema(task) if task in built_in() else json_schema(Tasks(only=task))
    items = list(_walk(schema, schema["$defs"], "", "", engine))
    by_key = {item.key: item for item in items}
    for key, value in extra.items():
        by_key.setdefault(key, _extra_field(key, value))
    words, used = table(), {"task", "engine", *table()["multi_gpu"]}
    groups = [Group("Task", [_task_field(task), by_key["engine"]])]
    for name in words["tasks"].get(task, words["tasks"]["other"]):
        row = words["groups"][name]
        keys = row.get("keys")
        if keys is None:
            keys = [key for key in by_key if key.startswith(f"{row['section']}.")]
            keys = [key for key in keys if key not in {"data.workers", "data.prefetch"}]
        chosen = [by_key[key] for key in keys if key in by_key]
        used.update(item.key for item in chosen)
        if chosen:
            groups.append(Group(row["title"], chosen, row.get("text", "")))
    more = [
        Group(title, rest)
        for section, title in words["sections"].items()
        if (
            rest := [f for key, f in by_key.items() if _section(key) == section and key not in used]
        )
    ]
    multi_gpu = [by_key[key] for key in words["multi_gpu"]]
    by_key["task"] = groups[0].fields[0]
    return FormFields(groups, more, multi_gpu, by_key)


@cache
def _schema(task: str) -> Schema:
    """The schema of a task of ours, which stays the same while this process lives."""
    return json_schema(Tasks(only=task))


def _section(key: str) -> str:
    return key.partition(".")[0]


def _task_field(task: str) -> Field:
    names = list(Tasks().names())
    if task not in names:
        names.append(task)
    choices: list[Choice] = [{"value": name, "label": name} for name in names]
    if task not in built_in():
        choices[-1]["label"] = f"{task} (your own)"
    label = table()["labels"]["task"]
    return Field(
        key="task",
        label=label,
        help="what is trained",
        kind="choice",
        default=task,
        choices=choices,
    )


def _walk(
    schema: Schema, definitions: Schema, prefix: str, section: str, engine: str
) -> Iterator[Field]:
    """The fields of a section of the schema, those of sections within it included."""
    for name, node in schema.get("properties", {}).items():
        key = prefix + name
        if key in {"task", SCHEMA_KEY}:
            continue
        inner = _definition(node, definitions)
        if inner is not None:
            yield from _walk(inner, definitions, f"{key}.", section, engine)
            continue
        forms = [form for form in node.get("anyOf", ()) if form.get("type") != "null"]
        optional = _definition(forms[0], definitions) if len(forms) == 1 else None
        if optional is not None:
            switch = {**node, "type": "boolean", "anyOf": []}
            yield replace(_field(key, switch, section, engine), is_section=True, nullable=False)
            yield from _walk(optional, definitions, f"{key}.", key, engine)
            continue
        yield _field(key, node, section, engine)


def _definition(node: Schema, definitions: Schema) -> Schema | None:
    """The section that a node refers to; None: it refers to none."""
    target = str(node.get("$ref", "")).rpartition("/")[2]
    definition: Schema | None = definitions.get(target)
    return definition if definition and "properties" in definition else None


def _field(key: str, node: Schema, section: str, engine: str) -> Field:
    words = table()
    kind, nullable = _kind_of(key, node)
    choices = _choices(key, node, engine) if kind == "choice" else ()
    placeholder = _PLACEHOLDERS.get(kind, "")
    if kind == "duration":
        placeholder = "10min" if _has_pattern(node, MINUTES_PATTERN) else "500 or 2ep"
    default = node.get("default")
    return Field(
        key=key,
        label=node.get("label") or words["labels"].get(key) or _label(key),
        help=node.get("description", ""),
        kind=kind,
        default=bool(default) if kind == "switch" else default,
        nullable=nullable,
        choices=choices,
        unit=node.get("unit") or words["units"].get(key, ""),
        placeholder=placeholder,
        section=section,
    )


def _label(key: str) -> str:
    """'model.norm_eps' -> 'Norm eps'."""
    text = key.rpartition(".")[2].replace("_", " ")
    return text[:1].upper() + text[1:]


def _kind_of(key: str, node: Schema) -> tuple[Kind, bool]:
    """The kind of a field, and whether it may have no value."""
    forms = node.get("anyOf") or node.get("oneOf") or [node]
    values = [form for form in forms if form.get("type") != "null"]
    nullable = len(values) < len(forms)
    if key in table()["paths"]:
        return "path", nullable
    if _has_pattern(node, EPOCHS_PATTERN):
        return "duration", nullable
    if _has_pattern(node, SIZE_PATTERN):
        return "size", nullable
    types = {str(form.get("type", "")) for form in values}
    if len(values) == 1:
        if "enum" in values[0] or "const" in values[0]:
            return "choice", nullable
        if types == {"array"} and _of_sections(values[0]):
            return "json", nullable
        return _SIMPLE.get(types.pop(), "json"), nullable
    if types <= {"integer", "number"}:
        return "number", nullable
    if key in table()["choices"]:
        return "choice", nullable
    return "json", nullable


def _of_sections(node: Schema) -> bool:
    """Whether a list's items are sections or mappings."""
    items = node.get("items", {})
    return "$ref" in items or items.get("type") == "object"


def _has_pattern(node: Schema, pattern: str) -> bool:
    forms = [node, *node.get("anyOf", ())]
    return any(form.get("pattern") == pattern for form in forms)


def _choices(key: str, node: Schema, engine: str) -> list[Choice]:
    if key == "devices.strategy":
        rows = strategies_of(engine)
        named: list[Choice] = [{"value": r.name, "label": f"{r.name}: {r.summary}"} for r in rows]
        return [{"value": "auto", "label": "auto: by the devices, and by what fits"}, *named]
    words = table()["choices"].get(key)
    if words is not None:
        return [{"value": str(value), "label": label} for value, label in words.items()]
    forms = node.get("anyOf") or [node]
    values = [value for form in forms for value in form.get("enum", [form.get("const")])]
    return [{"value": str(value), "label": str(value)} for value in values if value is not None]


def _extra_field(key: str, value: object) -> Field:
    """A field that the schema does not name: a key of a library's config, or of a user's class."""
    kinds: Mapping[type, Kind] = {bool: "switch", int: "integer", float: "number", str: "text"}
    kind = kinds.get(type(value), "json")
    words = "a key that the base gives; the task's class or library says what it means"
    return Field(key=key, label=_label(key), help=words, kind=kind, default=None, nullable=True)
