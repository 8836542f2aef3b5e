"""Another tool's config while its fields are read, one by one, into a config of ours.

Values pass unchecked: our own config refuses a wrong value, at its place in the other tool's file.
"""

import re
from collections.abc import Iterable

from samecurve.cli.importers import NOT_IN_THE_FILE
from samecurve.core.config.document import Key
from samecurve.seam import Document, UserError, join_key, suggest
from samecurve_products.convert.companions import Companions
from samecurve_products.convert.converted_config import (
    FieldReading,
    Outcome,
    Refusal,
    one_line,
    short_text,
)

SAME = object()  # the field's own value
LEAVE_OUT = "take it out of the file if the run does not need it"
_NOT_THERE = "as if it were not there"
_SECRET = re.compile(r"secret|password|api_?key|token$")
_OF_A_VOCABULARY = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|eot)_token$")


class ForeignConfig:
    """Another tool's config while its fields are read into `document`."""

    def __init__(
        self,
        document: Document,
        sections: tuple[str, ...],
        companions: Companions | None = None,
    ) -> None:
        """sections: dotted names of sections whose fields are read one by one, and with `.*` at
        the end lists whose items are such sections; any other section or list is one value.
        """
        self.document = Document()
        self.companions = companions or Companions()
        self.run_directory: str | None = None
        self.readings: list[FieldReading] = []
        self.refusals: list[Refusal] = []
        self._values: dict[str, object] = {}
        self._places: dict[str, str] = {}
        self._handled: set[str] = set()
        self._sections = sections
        self.include(document)

    def include(self, document: Document) -> None:
        """Take the fields of a document among those to read; fields of before win."""
        for name, item in document.value.items():
            self._collect(document, item, (name,))

    def _collect(self, document: Document, value: object, key: Key) -> None:
        kind = join_key(["*" if isinstance(part, int) else part for part in key])
        if isinstance(value, dict) and kind in self._sections:
            for name, item in value.items():
                self._collect(document, item, (*key, name))
        elif isinstance(value, list) and value and f"{kind}.*" in self._sections:
            for number, item in enumerate(value):
                self._collect(document, item, (*key, number))
        else:
            name = join_key(key)
            if self._values.get(name) is None:
                self._values[name] = value
                self._places[name] = document.origin_of(key)

    def _is_open(self, name: str) -> bool:
        """Whether the field is in the file and no rule has handled it."""
        return name in self._values and name not in self._handled

    def open_fields(self, beginning: str = "") -> list[str]:
        """The open fields whose names begin so."""
        return [name for name in self._values if self._is_open(name) and name.startswith(beginning)]

    def items(self, name: str) -> list[str]:
        """The dotted names of the items of a list that is read item by item."""
        beginning = f"{name}."
        parts = {
            field[len(beginning) :].partition(".")[0]
            for field in self._values
            if field.startswith(beginning)
        }
        return [beginning + part for part in sorted(filter(str.isdecimal, parts), key=int)]

    def place_of(self, name: str) -> str:
        """Where the field, or the first field of the section, is in the file."""
        if name in self._places:
            return self._places[name]
        return next(
            (place for field, place in self._places.items() if field.startswith(f"{name}.")), ""
        )

    def value(self, name: str, default: object = None) -> object:
        """The field's value; the default where the field is null or not in the file."""
        value = self._values.get(name)
        return default if value is None else value

    def convert(self, name: str, key: str, value: object = SAME, why: str = "") -> None:
        """Make the field a key of our config; null means the default, there and here."""
        if not self._is_open(name):
            return
        if self._values[name] is None:
            self.ignore(name, _NOT_THERE)
            return
        explanation = key
        if value is SAME:
            value = self._values[name]
        else:
            explanation += f" {short_text(value)}"
        if why:
            explanation += f" ({why})"
        place = self._places[name]
        if name != key:
            place += f" {one_line(name)}"
        self.document.set(key, value, place)
        self._record("read", name, explanation)

    def add_default(self, key: str, value: object, why: str) -> None:
        """Set a key to what the other tool does where its file says nothing. A flag still wins."""
        self.document.set(key, value, f"{NOT_IN_THE_FILE}; there: {why}")
        explanation = f"{key} {short_text(value)}"
        self.readings.append(FieldReading("read", "(not in the file)", why, explanation, "-"))

    def ignore(self, name: str, why: str) -> None:
        """Leave the field out."""
        if self._is_open(name):
            self._record("left", name, why)

    def refuse(self, name: str, why: str, remedy: str, key: str = "") -> None:
        """Refuse the field; a flag that sets `key` settles the refusal."""
        if self._is_open(name):
            cause = f"{one_line(name)} {self._shown(name)} {why}"
            self.refusals.append(Refusal(key, UserError(cause, remedy, self._places[name])))
            self._record("refused", name, why, key)

    def refuse_all(self, names: Iterable[str], why: str, remedy: str, key: str = "") -> None:
        """Refuse fields for one reason: one error, at the place of the first."""
        first = ""
        for name in names:
            if first and self._is_open(name):
                self._record("refused", name, f"as {one_line(first)}: {why}", key)
            elif self._is_open(name):
                first = name
                self.refuse(name, why, remedy, key)

    def refuse_default(
        self, field: str, value: object, why: str, remedy: str, key: str = ""
    ) -> None:
        """Refuse what the other tool does where its file has no such field."""
        cause = f"{field} is not in the file, and then {short_text(value)}: {why}"
        self.refusals.append(Refusal(key, UserError(cause, remedy, field)))
        self.readings.append(
            FieldReading(
                "refused", "(not in the file)", f"{field} {short_text(value)}", why, "-", key
            )
        )

    def refusals_with_origins(self) -> tuple[Refusal, ...]:
        """The refusals, each with the place that the conversion gave its key."""
        return tuple(
            refusal._replace(origin=self.document.origin_of(tuple(refusal.key.split("."))))
            for refusal in self.refusals
        )

    def note(self, name: str, explanation: str) -> None:
        """Name what became of a field that is read as a part of a value."""
        if self._is_open(name):
            self._record("read", name, explanation)

    def keep_refused(self, key: str, value: object) -> None:
        """Write a refused value at its key of our config, so that the written config is refused
        too: the key's default would train something else.
        """
        section, _, name = key.partition(".")
        self.document.value.setdefault(section, {}).setdefault(name, value)

    def is_set(self, key: str) -> bool:
        """Whether our key, or a section above it, was set already."""
        return bool(self.document.origin_of(tuple(key.split("."))))

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse the fields that no rule knows: such a field may mean anything.

        known: names for a suggestion
        """
        for name in self.open_fields():
            if self._values[name] is None:
                self.ignore(name, _NOT_THERE)
            why = "is a field that this program does not know"
            self.refuse(name, why, suggest(name, known) or LEAVE_OUT)

    def _record(self, outcome: Outcome, name: str, text: str, key: str = "") -> None:
        self._handled.add(name)
        place = self._places[name]
        self.readings.append(
            FieldReading(outcome, one_line(name), self._shown(name), text, place, key)
        )

    def _shown(self, name: str) -> str:
        if _SECRET.search(name.lower()) and not _OF_A_VOCABULARY.search(name.lower()):
            return "(not shown)"
        return short_text(self._values[name])
