"""The result of a conversion: our config, and what became of each field of the other tool's config.

Every field ends in one FieldReading.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from samecurve.core.config.document import Key
from samecurve.seam import Document, UserError, dump_document, join_key

Outcome = Literal["read", "left", "settled", "refused"]

_SECTIONS = [
    "task",
    "engine",
    "model",
    "data",
    "batch",
    "optimizer",
    "schedule",
    "train",
    "devices",
    "track",
]
_HEADINGS: dict[Outcome, str] = {
    "read": "How each field was read",
    "left": "Left out, and why",
    "settled": "Can't be honoured, and settled by a flag",
    "refused": "REFUSED: without these, this is not what was trained before",
}
_MOST_CHARACTERS = 60  # of a value in a message
_MOST_VALUES = 3  # of fields left out for one reason; of more, only their names are shown


class FieldReading(NamedTuple):
    """A field of the other tool's config, and what became of it.

    read: the field became a key of our config
    left: our config does not need the field
    refused: the field would change what is trained, and nothing here can honour it
    settled: the field was refused, and a flag has set the key of our config that settles it
    """

    outcome: Outcome
    field: str
    value_text: str
    explanation: str  # the key of our config, or the reason
    place: str  # file:line:column
    key: str = ""  # the key of our config that settles a refusal when a flag sets it


class Refusal(NamedTuple):
    """A field that can't be honoured."""

    key: str  # the key of our config that settles the refusal when a flag sets it; '': none does
    error: UserError
    origin: str = ""  # where the conversion itself took that key from


@dataclass(frozen=True)
class ConvertedConfig:
    """A config of another tool, read as a config of ours."""

    tool: str
    document: Document
    readings: tuple[FieldReading, ...]
    refusals: tuple[Refusal, ...]
    run_directory: str | None = None  # the directory that the other tool's config names

    def unresolved(self, document: Document) -> list[UserError]:
        """The refusals that no flag has settled in this document."""
        return [refusal.error for refusal in self.refusals if not _is_settled(refusal, document)]

    def after_flags(self) -> "ConvertedConfig":
        """This config, with what flags have set in the document since it was read."""
        settled = {each.key for each in self.refusals if _is_settled(each, self.document)}
        readings = [
            reading._replace(outcome="settled")
            if reading.outcome == "refused" and reading.key in settled
            else reading
            for reading in self.readings
        ]
        readings += [
            FieldReading("read", one_line(origin), short_text(value), one_line(join_key(key)), "-")
            for key, origin in self.document.origins.items()
            if origin.startswith("-") and not isinstance(value := self._value_at(key), dict)
        ]
        return replace(self, readings=tuple(readings))

    def _value_at(self, key: Key) -> object:
        value: Any = self.document.value
        for part in key:
            value = value[part]
        return value

    def summary_lines(self) -> list[str]:
        """A line for each field that was read; fields left out for one reason share a line."""
        lines = [
            f"read   {r.place}  {r.field} {r.value_text} -> {r.explanation}"
            for r in self.readings
            if r.outcome == "read"
        ]
        lines += [
            f"flag   {r.place}  {r.field} {r.value_text} {r.explanation}: {r.key} is set by a flag"
            for r in self.readings
            if r.outcome == "settled"
        ]
        by_reason: dict[str, list[FieldReading]] = {}
        for r in self.readings:
            if r.outcome == "left":
                by_reason.setdefault(r.explanation, []).append(r)
        for reason, alike in by_reason.items():
            fields = [f"{r.field} {r.value_text}" for r in alike]
            if len(alike) > _MOST_VALUES:
                fields = _shortened([r.field for r in alike])
            lines.append(f"left   {', '.join(fields)}: {reason}")
        return lines

    def to_yaml(self, name: str) -> str:
        """The converted config as YAML; comments above it say what became of each field.

        name: the file name of the other tool's config
        """
        rows = [f"# Made by `samecurve convert` from {one_line(name)}, a config of {self.tool}."]
        for outcome, heading in _HEADINGS.items():
            readings = [r for r in self.readings if r.outcome == outcome]
            if readings:
                rows.append(f"# {heading}:")
            sign = "->" if outcome == "read" else "|"
            rows += [f"#   {r.field} {r.value_text} {sign} {r.explanation}" for r in readings]
        if self.run_directory is not None:
            directory = one_line(self.run_directory)
            rows.append(f"# Its run directory goes on the command line: --save-dir {directory}")
        value = self.document.value
        ordered = {section: value[section] for section in _SECTIONS if section in value}
        return "\n".join(rows) + "\n" + dump_document(ordered)


def _is_settled(refusal: Refusal, document: Document) -> bool:
    """Whether a flag has set the key that settles the refusal."""
    if not refusal.key:
        return False
    return document.origin_of(tuple(refusal.key.split("."))) != refusal.origin


def _shortened(fields: list[str]) -> list[str]:
    """The names of fields; many of one section are one name with their number."""
    sections: dict[str, list[str]] = {}
    for field in fields:
        sections.setdefault(field.rpartition(".")[0], []).append(field)
    shown = []
    for section, members in sections.items():
        if section and len(members) > _MOST_VALUES:
            shown.append(f"{section}.* ({len(members)} fields)")
        else:
            shown += members
    return shown


def short_text(value: object) -> str:
    """A value as YAML writes it, on one short line."""
    if isinstance(value, dict):
        return f"{{{len(value)} fields}}"
    if isinstance(value, str) and re.search(r"[^\d.+-]", value):
        text = one_line(value)
    else:
        text = json.dumps(value, default=str)
    if len(text) > _MOST_CHARACTERS:
        return text[: _MOST_CHARACTERS - 3] + "..."
    return text


def one_line(text: str) -> str:
    """The text with line breaks and other unprintable characters escaped."""
    if text.isprintable():
        return text
    return json.dumps(text)[1:-1]
