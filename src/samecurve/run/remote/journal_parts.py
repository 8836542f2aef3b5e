"""The journal in a store: whole lines, in parts that are named by the byte at which they begin.

The last part is written anew as it grows, until it has PART bytes; then the next one begins. A
write replaces an object at once, so a reader never sees half a line. Each sending costs at most
PART bytes beside the new lines: the traffic does not grow with the square of the journal.
"""

from collections.abc import Iterator
from pathlib import Path

from samecurve.core.events import Event
from samecurve.core.system import regular_only
from samecurve.observe import event_of
from samecurve.run.remote.stored_run import StoredRun, part_name
from samecurve.storage.place import Place

PART = 256 << 10  # bytes
_BLOCK = 4 << 20  # bytes read at once


class JournalParts:
    """The parts that the store has of a journal, and those that it lacks."""

    def __init__(self, place: Place, journal: Path) -> None:
        self._place, self._journal = place, journal
        self._begin = self._end = 0  # of the last part

    def compare(self, stored: StoredRun) -> None:
        """Take up what the store has. Parts of another journal, which was longer, are removed."""
        parts = list(stored.journal_parts())
        begin, end = 0, 0
        if parts:
            begin, last = parts[-1]
            end = begin + last.size
        if end > self._size():
            self._place.remove(part.name for _, part in reversed(parts))
            begin = end = 0
        self._begin, self._end = begin, end

    def send(self) -> None:
        """Write all whole lines that the store lacks."""
        while text := self._lines():
            self._place.write(part_name(self._begin), text)
            self._end = self._begin + len(text)
            if len(text) >= PART:
                self._begin = self._end

    def _lines(self) -> bytes:
        """The last part as it should be; b'': the store has it."""
        if self._size() <= self._end:
            return b""
        with open(self._journal, "rb", opener=regular_only) as file:
            file.seek(self._begin)
            text = file.read(self._end - self._begin + PART)
            end = text.rfind(b"\n") + 1
            while not end and (block := file.read(_BLOCK)):  # a line that is longer than a part
                text += block
                end = text.rfind(b"\n") + 1
        return text[:end] if self._begin + end > self._end else b""

    def _size(self) -> int:
        return self._journal.stat().st_size if self._journal.exists() else 0


class NewEvents:
    """The events that are added to a journal from some byte on."""

    def __init__(self, journal: Path, start: int) -> None:
        self._journal, self._position = journal, start

    def read(self) -> Iterator[Event]:
        if not self._journal.exists():
            return
        with open(self._journal, "rb", opener=regular_only) as file:
            file.seek(self._position)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._position += end
        yield from filter(None, map(event_of, text[:end].split(b"\n")))
