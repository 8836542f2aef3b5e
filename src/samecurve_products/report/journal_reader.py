"""Read a journal from where the last reading ended, in bounded memory.

A reader of a run of a million steps holds a few megabytes. Its state can be saved, so that a long
journal need not be read again. Steps that a resume made void are counted, but are not in the
columns.
"""

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samecurve.observe import VOIDED
from samecurve.seam import Event, counted, event_of, regular_only
from samecurve_products.report import journal_events
from samecurve_products.report.journal_events import begin_start, even_events
from samecurve_products.report.record import RunRecord, Start, Totals
from samecurve_products.report.steps import STEP, TIME, Steps, Table

_BATCH = 1 << 18  # bytes of lines that are parsed at once
_MAX_STEPS = 1 << 53  # a float rounds larger integers
_MAX_LINE = 1 << 26  # bytes; a longer line is passed over in pieces
_MAX_EVENT = 1 << 22  # bytes of a line whose event is kept
_REAL = {int, float}
_HEAD = 4096  # bytes by which a journal is known again
_STATE = 2  # number of this form of a saved state
_SAVED = ("environment", "counts", "totals", "starts", "notable", "best", "tested")

Values = dict[str, Any]  # a line of the journal


@dataclass
class _Place:
    """Where a reader is, and whose journal it reads."""

    first_line: str = ""  # its hash; '': it is not whole yet
    inode: int = 0
    position: int = 0  # byte up to which the journal was read
    num_strange: int = 0
    highest: int = 0  # step of an event that a later `resumed` may make void
    plan: Mapping[str, object] = field(default_factory=dict)  # of the last start that has one


class JournalReader:
    """A reader of a run's journal.

    content: what was read so far, as a record without plan and config
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.content = RunRecord(directory=self._path.parent, live=False)
        self._place = _Place()
        self.size = 0  # of the journal, when it was last read
        self.error = ""  # why it can't be read
        self._event_at = 0  # byte of the last event that is no step
        self._read_again_bytes = 0

    @property
    def position(self) -> int:
        """Byte up to which the journal was read."""
        return self._place.position

    @property
    def plan(self) -> Mapping[str, object]:
        """The plan of the last start that has one."""
        return self._place.plan

    def read(self, most_bytes: int | None = None) -> bool:
        """Read on. Returns whether the end was reached. A last line without its end is left.

        A journal that was replaced or shortened is read from its beginning.
        """
        try:
            with open(self._path, "rb", opener=regular_only) as file:
                self._check_identity(file)
                self.error = ""
                return self._read_from(file, most_bytes)
        except OSError as error:
            self._begin_anew()
            self.error = error.strerror or str(error)
            return True

    def _check_identity(self, file: BinaryIO) -> None:
        about, place = os.fstat(file.fileno()), self._place
        first_line = _first_line_hash(file)
        is_other = place.first_line not in {"", first_line} or place.inode != about.st_ino
        if is_other or about.st_size < place.position:
            self._begin_anew()
        self.size = about.st_size
        self._place.inode, self._place.first_line = about.st_ino, first_line
        self.content.identity = first_line

    def _read_from(self, file: BinaryIO, most_bytes: int | None) -> bool:
        file.seek(self.position)
        stop = math.inf if most_bytes is None else self.position + most_bytes
        rest = bytearray()  # of a line whose end is not read yet
        while block := file.read(_BATCH):
            rest += block
            if b"\n" in block:
                whole, _, after = rest.rpartition(b"\n")
                self._add_lines(bytes(whole).split(b"\n"))
                self._place.position += len(whole) + 1
                rest = after
            elif len(rest) >= _MAX_LINE:
                self._place.num_strange += 1
                self._pass_over(file, rest)
                rest = bytearray()
            if self.position >= stop:
                return False
        return True

    def _pass_over(self, file: BinaryIO, piece: bytearray) -> None:
        """Go on behind a piece of a line that is too long, and behind a hole."""
        self._place.position += len(piece)
        if not any(piece):
            with suppress(OSError):  # only a hole is left, or this file system knows no holes
                data = os.lseek(file.fileno(), self.position, os.SEEK_DATA)
                self._place.position = file.seek(data)

    def _add_lines(self, lines: list[bytes]) -> None:
        """Add the lines that begin at the position."""
        values = _parsed(lines)
        lengths = (len(line) + 1 for line in lines[:-1])
        offsets = list(accumulate(lengths, initial=self.position))
        are_steps = [type(each) is dict and each.get("kind") == "step" for each in values]
        first = 0
        for is_step, group in groupby(are_steps):
            last = first + len(list(group))
            if not is_step or not self._add_steps(values[first:last], offsets[first:last]):
                for line, offset in zip(lines[first:last], offsets[first:last], strict=True):
                    self._add_line(line, offset)
            first = last

    def _add_steps(self, steps: list[Values], offsets: list[int]) -> bool:
        """Add steps, if each has a step and a time that are plain numbers."""
        types = {type(step.get("step")) for step in steps}
        if types != {int} or not _REAL.issuperset(type(step.get("time")) for step in steps):
            return False
        rows = self.content.steps.rows_of(steps, offsets)
        numbers, times = rows[:, STEP], rows[:, TIME]
        if not (np.isfinite(rows[:, [STEP, TIME]]).all() and np.abs(numbers).max() < _MAX_STEPS):
            return False
        if not self.content.starts:
            begin_start(self.content, float(times[0]), int(numbers[0]))
        start = self.content.starts[-1]
        start.last_time = max(start.last_time, float(times.max()))
        start.last_step = int(numbers[-1])
        self._place.highest = max(self._place.highest, int(numbers.max()))
        self.content.counts["step"] += len(steps)
        self.content.steps.add(rows)
        return True

    def _add_line(self, line: bytes, offset: int) -> None:
        if len(line) <= _MAX_EVENT:
            event = event_of(line)
            if event and math.isfinite(event.time) and abs(event.step) < _MAX_STEPS:
                self._add(event, offset)
                return
        elif b'"kind": "hashed"' in line[:200]:
            return
        self._place.num_strange += 1

    def _add(self, event: Event, offset: int) -> None:
        content, place = self.content, self._place
        place.plan = journal_events.begin_start_with(content, event) or place.plan
        if event.kind in VOIDED:
            place.highest = max(place.highest, event.step)
        journal_events.keep_event(content, event)
        if event.kind == "step":  # its step or time is no plain number
            values = {**event.values, "step": event.step, "time": event.time}
            content.steps.add(content.steps.rows_of([values], [offset]))
        elif event.kind == "resumed" and place.highest > event.step:
            self._event_at, place.highest = offset, event.step
            journal_events.void_events_beyond(content, event.step)
            count, seconds = content.steps.truncate(event.step, self._read_again)
            content.totals.voided_steps += count
            content.totals.voided += seconds

    def _read_again(self, begin: int, end: int | None) -> Table:
        """Read the steps of a part of the journal again.

        A journal that wants more than twice itself read again is damaged: it gets no steps.
        """
        steps = self.content.steps
        end = self._event_at if end is None else end
        self._read_again_bytes += end - begin
        if self._read_again_bytes > 2 * self.size + _BATCH:
            return steps.rows_of([], [])
        with open(self._path, "rb", opener=regular_only) as file:
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")
        kept: list[tuple[Values, int]] = []
        for line in lines:
            values = _value_of(line)
            if isinstance(values, dict) and type(values.get("step")) is int:
                if values.get("kind") == "step":
                    kept.append((values, begin))
                elif values.get("kind") == "resumed":
                    kept = [each for each in kept if each[0]["step"] <= values["step"]]
            begin += len(line) + 1
        return steps.rows_of([values for values, _ in kept], [offset for _, offset in kept])

    def faults(self, *, live: bool) -> list[str]:
        """The journal's unreadable parts in words. live: a last line without an end is no fault"""
        if self.error:
            return [f"journal.jsonl can't be read: {self.error}; there are no curves"]
        count = self._place.num_strange + (self.position < self.size and not live)
        are = f"{counted(count, 'line')} passed over that {'is' if count == 1 else 'are'} no event"
        return [f"journal.jsonl: {are} (damaged, or cut off by a kill)"] if count else []

    # -- saving

    def save(self, path: Path) -> None:
        """Write the whole state to a file, whole or not at all. OSError: it can't be written."""
        state: Values = {name: getattr(self.content, name) for name in _SAVED}
        state |= {"form": _STATE, "place": self._place}
        state["even"] = {
            name: {"events": list(events), "every": events.every, "seen": events.seen}
            for name, events in even_events(self.content).items()
        }
        arrays: dict[str, Any] = self.content.steps.to_arrays()
        arrays["state"] = np.frombuffer(json.dumps(state, default=asdict).encode(), np.uint8)
        scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with open(scratch, "wb") as file:
                np.savez(file, **arrays)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: Path, path: Path) -> "JournalReader":
        """A reader with the state that save() wrote; one without a state, if there is none.

        Whether the state is that of the journal is seen by the next read().
        """
        reader = cls(directory)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                reader._restore(json.loads(arrays["state"].tobytes()), arrays)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
            return cls(directory)
        return reader

    def _restore(self, state: Values, arrays: Mapping[str, Any]) -> None:
        if state["form"] != _STATE:
            raise ValueError("it was saved by another version")
        content = self.content
        content.steps = Steps.from_arrays(arrays)
        self._place = _Place(**state["place"])
        content.identity, content.environment = self._place.first_line, state["environment"]
        content.counts.update(state["counts"])
        content.totals = Totals(**state["totals"])
        content.starts = [Start(**start) for start in state["starts"]]
        content.notable = [Event(**event) for event in state["notable"]]
        content.best, content.tested = (
            Event(**state[name]) if state[name] else None for name in ("best", "tested")
        )
        for name, events in even_events(content).items():
            kept = state["even"][name]
            events.restore([Event(**e) for e in kept["events"]], kept["every"], kept["seen"])


def _parsed(lines: list[bytes]) -> list[Any]:
    """The value of each line; None: it is no JSON, or too long."""
    if max(map(len, lines)) <= _MAX_EVENT:
        with suppress(ValueError, RecursionError):
            values = json.loads(b"[%b]" % b",".join(lines))  # half the time of a call for each line
            if len(values) == len(lines):
                return list(values)
    return [_value_of(line) for line in lines]


def _value_of(line: bytes) -> object:
    if len(line) > _MAX_EVENT:
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _first_line_hash(file: BinaryIO) -> str:
    """The hash of the first line's first bytes; '': it is not whole yet."""
    head, end, _ = file.read(_HEAD).partition(b"\n")
    return hashlib.sha256(head).hexdigest() if end or len(head) == _HEAD else ""
