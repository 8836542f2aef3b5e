"""The fields of another tool's config, and what became of each.

Every field ends in exactly one Reading. Values pass on as they stand: whether one is right is for
our config to say, at the old file's place.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from samecurve.core.config.document import Document, Key, dump, join_key, suggest
from samecurve.errors import UserError

Table = Mapping[str | bool, str]  # a word in capitals, or a switch -> the value of ours

_SAME = object()
_SECTIONS = (
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
)
_HIDDEN = ("secret", "token", "password")


class FieldReading(NamedTuple):
    """What became of one field.

    read: it became a key of ours
    left: nothing here needs it
    refused: it would change what is trained, and can't be served
    """

    outcome: Literal["read", "left", "refused"]
    field: str
    value_text: str
    explanation: str  # the key that it became, or the reason
    place: str


class Refusal(NamedTuple):
    """What can't be served."""

    key: str  # of ours, which settles it when a flag gives it; '' if none does
    error: UserError


@dataclass(frozen=True)
class ConvertedConfig:
    """A config of another tool, read as one of ours."""

    tool: str  # whose it was
    document: Document
    readings: tuple[FieldReading, ...]
    refusals: tuple[Refusal, ...]
    run_directory: str | None = None  # that it names

    def unresolved(self, document: Document) -> list[UserError]:
        """What is still refused of this config, now that flags were added to it."""
        return [
            error
            for key, error in self.refusals
            if not key or not document.origin_of(tuple(key.split(".")))
        ]

    def summary_lines(self) -> list[str]:
        """How each field was read, for people; fields left for one reason share a line."""
        lines = [
            f"read   {r.place}  {r.field} {r.value_text} -> {r.explanation}"
            for r in self.readings
            if r.outcome == "read"
        ]
        by_reason: dict[str, list[FieldReading]] = {}
        for r in self.readings:
            if r.outcome == "left":
                by_reason.setdefault(r.explanation, []).append(r)
        for reason, alike in by_reason.items():
            if len(alike) > 3:
                fields = [r.field for r in alike]
            else:
                fields = [f"{r.field} {r.value_text}" for r in alike]
            lines.append(f"left   {', '.join(fields)}: {reason}")
        return lines

    def to_yaml(self, name: str) -> str:
        """The config as a file of ours, with what became of each old field above it.

        name: of the old file
        """
        headings = {
            "read": "How each field was read",
            "left": "Left out, and why",
            "refused": "REFUSED: without these, this is not what was trained before",
        }
        rows = [f"# Made by `samecurve convert` from {one_line(name)}, a config of {self.tool}."]
        for outcome, heading in headings.items():
            readings = [r for r in self.readings if r.outcome == outcome]
            if readings:
                rows.append(f"# {heading}:")
            sign = "->" if outcome == "read" else "|"
            rows += [f"#   {r.field} {r.value_text} {sign} {r.explanation}" for r in readings]
        if self.run_directory is not None:
            directory = one_line(self.run_directory)
            rows.append(f"# Its run directory goes on the command line: --save-dir {directory}")
        value = {
            section: self.document.value[section]
            for section in _SECTIONS
            if section in self.document.value
        }
        return "\n".join(rows) + "\n" + dump(value)


class ForeignConfig:
    """A config of another tool while its fields are read, one by one, into `document`.

    A field is converted, ignored or refused once; what was done first holds.
    """

    def __init__(self, document: Document, sections: tuple[str, ...]) -> None:
        """sections: dotted names whose fields count one by one; what lies deeper is one value."""
        self.document = Document()
        self.run_directory: str | None = None
        self.readings: list[FieldReading] = []
        self.refusals: list[Refusal] = []
        self._values: dict[str, object] = {}
        self._places: dict[str, str] = {}
        self._handled: set[str] = set()
        self._collect(document, document.value, (), sections)

    def _collect(
        self, document: Document, value: Mapping[str, object], above: Key, sections: tuple[str, ...]
    ) -> None:
        for name, item in value.items():
            key = (*above, name)
            if isinstance(item, dict) and join_key(key) in sections:
                self._collect(document, item, key, sections)
            else:
                self._values[join_key(key)] = item
                self._places[join_key(key)] = document.origin_of(key)

    def _is_open(self, field: str) -> bool:
        """Whether it is in the file, and nothing became of it yet."""
        return field in self._values and field not in self._handled

    def open_fields(self, below: str = "") -> list[str]:
        """The open fields whose names begin so."""
        return [field for field in self._values if self._is_open(field) and field.startswith(below)]

    def value(self, field: str, default: object = None) -> object:
        value = self._values.get(field)
        return default if value is None else value

    def convert(self, field: str, key: str, value: object = _SAME, why: str = "") -> None:
        """The field became a key of ours; null means the default, there and here."""
        if not self._is_open(field):
            return
        if self._values[field] is None:
            self.ignore(field, "as if it were not there")
            return
        explanation = key
        if value is _SAME:
            value = self._values[field]
        else:
            explanation += f" {short_text(value)}"
        if why:
            explanation += f" ({why})"
        place = self._places[field]
        if field != key:
            place += f" {one_line(field)}"
        self.document.set(key, value, place)
        self._record("read", field, explanation)

    def convert_by_table(
        self, field: str, key: str, table: Table, remedy: str, why: str = ""
    ) -> None:
        """The field became a key of ours by a table; what is not in it is refused."""
        value = self.value(field)
        word = value.strip().upper() if isinstance(value, str) else value
        if value is None:
            self.convert(field, key)
        elif isinstance(word, str | bool) and word in table:
            self.convert(field, key, table[word], why)
        else:
            self.refuse(
                field,
                f"is not one of {', '.join(map(short_text, table))}, which there are here",
                remedy,
                key,
            )

    def add_default(self, key: str, value: object, why: str) -> None:
        """Not in the file: how that tool does it then. A flag still wins."""
        self.document.set(key, value, f"not in the file; there: {why}")
        self.readings.append(
            FieldReading("read", "(not in the file)", why, f"{key} {short_text(value)}", "-")
        )

    def ignore(self, field: str, why: str) -> None:
        if self._is_open(field):
            self._record("left", field, why)

    def refuse(self, field: str, why: str, remedy: str, key: str = "") -> None:
        if self._is_open(field):
            cause = f"{one_line(field)} {self._shown(field)} {why}"
            self.refusals.append(Refusal(key, UserError(cause, remedy, self._places[field])))
            self._record("refused", field, why)

    def leave(self, key: str, value: object) -> None:
        """What a key of ours holds although it is refused: its default would train something else,
        and the config that is written has to be refused, too.
        """
        section, _, name = key.partition(".")
        self.document.value.setdefault(section, {}).setdefault(name, value)

    def refuse_unknown(self, known: tuple[str, ...]) -> None:
        """What is in no table is refused by name: it may mean anything."""
        for field in self.open_fields():
            if self._values[field] is None:
                self.ignore(field, "as if it were not there")
            near = suggest(field, known)
            self.refuse(
                field,
                "is a field that this program does not know",
                near or "take it out of the file if the run does not need it",
            )

    def finish(self, tool: str) -> ConvertedConfig:
        return ConvertedConfig(
            tool, self.document, tuple(self.readings), tuple(self.refusals), self.run_directory
        )

    def _record(self, outcome: Literal["read", "left", "refused"], field: str, text: str) -> None:
        self._handled.add(field)
        self.readings.append(
            FieldReading(outcome, one_line(field), self._shown(field), text, self._places[field])
        )

    def _shown(self, field: str) -> str:
        if any(word in field.lower() for word in _HIDDEN):
            return "(not shown)"
        return short_text(self._values[field])


def short_text(value: object) -> str:
    """A value as YAML has it, on one short line."""
    if isinstance(value, dict):
        return f"{{{len(value)} fields}}"
    if isinstance(value, str) and re.search(r"[^\d.+-]", value):
        text = one_line(value)
    else:
        text = json.dumps(value, default=str)
    if len(text) > 60:
        return text[:57] + "..."
    return text


def one_line(text: str) -> str:
    """On one line, whatever is in it."""
    if text.isprintable():
        return text
    return json.dumps(text)[1:-1]


def epochs(count: object) -> str:
    """2 -> '2ep'; what is no number stays, and is refused by our config."""
    if isinstance(count, int | float) and not isinstance(count, bool) and count >= 0:
        return f"{count:.9g}ep"
    return str(count)
