"""Values of a form: read from the browser, put into a document, and shown as they stand there."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from samecurve.core.config.document import Document, parse, parse_setting
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.section import flatten
from samecurve.errors import UserError
from samecurve.ui.form.fields import Field, FormFields

Values = Mapping[str, Any]  # dotted keys of the config, as the browser sends them
_MOST_VALUES, _MOST_TEXT = 300, 20_000


def check_values(values: object) -> Values:
    """Check the values that the browser sends. UserError: no mapping of texts, or a huge one."""
    if not isinstance(values, Mapping) or len(values) > _MOST_VALUES:
        raise UserError("the request's values are no mapping of keys", "load the page again")
    return {str(key): value for key, value in values.items()}


def read_values(values: Values, fields: FormFields) -> dict[str, Any]:
    """The values that the browser sends, each of its field's kind.

    A text that is no number where one is needed stays a text: loading the config says so beside
    the field. UserError: a value of no known key, or a huge one.
    """
    read: dict[str, Any] = {}
    for key, value in values.items():
        field = fields.by_key.get(key)
        if field is None:
            raise UserError(f"{key[:80]}: unknown key", "load the page again", key[:80])
        if isinstance(value, str) and len(value) > _MOST_TEXT:
            raise UserError(f"{key}: more than {_MOST_TEXT} characters", "a shorter text", key)
        read[key] = _read(field, value)
    return read


def _read(field: Field, value: Any) -> Any:
    if value == "" and (field.nullable or field.kind not in {"text", "path", "choice"}):
        return None if field.nullable else field.default
    if field.kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if field.kind == "choice" and value in {"true", "false"}:
        return value == "true"
    if not isinstance(value, str) or field.kind in {"text", "choice"}:
        return value
    text = value.strip()
    if field.kind == "list" and not text.startswith("["):
        return _lines(field, value)
    if field.kind == "path" and not text.startswith("["):
        return text
    return _yaml(text, field.key)


def _lines(field: Field, text: str) -> list[Any]:
    """The items of a list typed as text: one a line, or numbers with commas between them."""
    default = field.default
    if isinstance(default, list) and default and not isinstance(default[0], str):
        items = _yaml(f"[{text}]", field.key)
        return items if isinstance(items, list) else [items]
    return [line for line in text.splitlines() if line.strip()]


def _yaml(text: str, key: str) -> Any:
    """A value as a config file has it; the text itself where it is no YAML."""
    try:
        return parse(f"value: {text}", key).value.get("value")
    except UserError:
        return text


def apply_values(document: Document, values: Values, fields: FormFields) -> dict[str, Any]:
    """Set the values in the document, sections before what is in them. Returns what has changed.

    The place of such a value, which errors name, is its own key.
    """
    changes: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: (key.count("."), key)):
        value, field = values[key], fields.by_key[key]
        if field.is_section:
            is_there = _at(document.value, key) is not None
            if bool(value) == is_there:
                continue
            value = {} if value else None
        elif is_given(document, key) and _at(document.value, key) == value:
            continue
        elif field.section and _at(document.value, field.section) is None:
            continue  # the section is off
        document.set(key, value, key)
        changes[key] = value
    return changes


def settings(changes: Mapping[str, Any]) -> Iterator[str]:
    """The changes as values of --set."""
    for key, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if parse_back(key, text) != (key, value):
            text = json.dumps(value, ensure_ascii=False)
        yield f"{key}={text}"


def parse_back(key: str, text: str) -> tuple[str, Any] | None:
    """The value that the command line makes of KEY=TEXT; None: it refuses it."""
    try:
        return parse_setting(f"{key}={text}")
    except UserError:
        return None


def extra_keys(document: Document, known: FormFields) -> dict[str, Any]:
    """Keys of `model` and `data` that no field has, with their values."""
    extra: dict[str, Any] = {}
    for section in ("model", "data"):
        values = document.value.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            key = f"{section}.{name}"
            if not any(other == key or other.startswith(f"{key}.") for other in known.by_key):
                extra[key] = value
    return extra


def shown_values(
    document: Document, loaded: LoadedConfig | None, fields: FormFields
) -> dict[str, Any]:
    """The value of each field: as the document spells it, else what the config has by default."""
    settled = flatten(loaded.config) if loaded else {}
    shown: dict[str, Any] = {}
    for key, field in fields.by_key.items():
        value = settled.get(key, field.default)
        if is_given(document, key):
            value = _at(document.value, key)
        if field.is_section:
            value = value is not None and value is not False
        shown[key] = _shown(field, value)
    return shown


def _shown(field: Field, value: Any) -> Any:
    if isinstance(value, tuple):
        value = list(value)
    is_text = field.kind in {"json", "path"} and isinstance(value, list | dict)
    return json.dumps(value, ensure_ascii=False, default=str) if is_text else value


def is_given(document: Document, key: str) -> bool:
    """Whether the document has the key itself."""
    *sections, name = key.split(".")
    at: Any = document.value
    for section in sections:
        at = at.get(section) if isinstance(at, dict) else None
    return isinstance(at, dict) and name in at


def _at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
