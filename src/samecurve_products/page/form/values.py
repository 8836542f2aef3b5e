"""Values of a form: texts as the controls show them, and the config's values, both ways.

The browser shows the texts that it gets from here and sends back the texts of the controls that
the user has touched. It reads no value and compares none, so what is shown is what is sent.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from samecurve.core.config import flatten
from samecurve.seam import Document, LoadedConfig, UserError, parse_document, parse_setting
from samecurve_products.page.form.fields import Field, FormFields

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
    """The value of a control's text; a request may also have the value itself."""
    if not isinstance(value, str):
        return _whole(value) if field.kind == "integer" else value
    text = value if field.kind == "text" else value.strip()
    if not text:
        return _read_empty(field)
    if field.kind == "text":
        return text
    if field.kind == "choice":
        return _chosen(field, text)
    if field.kind in {"number", "integer"}:
        number = _yaml(text, field.key)
        if isinstance(number, bool) or not isinstance(number, int | float) or "#" in text:
            return text
        return _whole(number) if field.kind == "integer" else number
    if field.kind == "list" and not text.startswith("["):
        return _lines(field, value)
    if field.kind == "path" and not text.startswith("["):
        return text
    read = _yaml(text, field.key)
    return text if field.kind == "duration" and isinstance(read, bool) else read


def _read_empty(field: Field) -> Any:
    """The value of an empty control. '' where the config needs one: loading the config says so."""
    if field.nullable:
        return None
    return [] if field.kind == "list" or isinstance(field.default, list) else ""


def _whole(value: Any) -> Any:
    """A whole number as an integer: 8.0 -> 8. Any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _chosen(field: Field, text: str) -> Any:
    """The value of a choice, whose texts stand for booleans and numbers too."""
    if text in {"true", "false"}:
        return text == "true"
    is_number = isinstance(field.default, int) and not isinstance(field.default, bool)
    return _yaml(text, field.key) if is_number else text


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
        return parse_document(f"value: {text}", key).value.get("value")
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
        elif is_given(document, key) and _text(field, _at(document.value, key)) == _text(
            field, value
        ):
            continue  # both look the same in the form
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
) -> dict[str, str | bool]:
    """What each control shows: the value as the document spells it, else the config's default.

    A switch has a boolean, every other control a text.
    """
    settled = flatten(loaded.config) if loaded else {}
    shown: dict[str, str | bool] = {}
    for key, field in fields.by_key.items():
        value = settled.get(key, field.default)
        if is_given(document, key):
            value = _at(document.value, key)
        shown[key] = _text(field, value)
    return shown


def _text(field: Field, value: Any) -> str | bool:
    """A value as its control shows it; `_read` makes the value of the text again."""
    if field.kind == "switch":
        return bool(value) or (field.is_section and value is not None and value is not False)
    if value is None:
        return ""
    text = value if isinstance(value, str) else _json(value)
    if isinstance(value, list | tuple):
        words = all(isinstance(item, str) for item in value)
        text = "\n".join(value) if words else ", ".join(map(_json, value))
    reads_back = _read(field, text) == (list(value) if isinstance(value, tuple) else value)
    return text if reads_back or field.kind == "text" else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


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
