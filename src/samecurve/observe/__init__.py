"""What a run writes as it goes: its journal, and each rank's heartbeat.

journal.jsonl says what happened, one JSON line each.

Written by one rank; console, trackers and reports only read it.

Every line is written whole, in one O_APPEND write. Lines of kind `step` are written at most half a
second late, all others at once.
"""

import hashlib
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from samecurve.core.events import ACTIVITIES, Activity, Beat, Event
from samecurve.core.system import explain_os_error, regular_only, write_all
from samecurve.errors import RunError

VERSION = 1  # of the format, in each `planned` line
# kinds that a later `resumed` at an earlier step makes void
VOIDED = frozenset({"step", "evaluated", "tested", "saved", "uploaded", "sampled", "hashed"})
_ENDS = frozenset({"finished", "stopped"})
_MAX_DELAY = 0.5  # seconds
_BLOCK = 1 << 20  # bytes of one read
_MOST_LINE = 1 << 26  # most bytes of a line: it may hold texts, or hashes of every array
_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps makes one for each line
_HEARTBEAT = struct.Struct("<qII")  # step, activity, number of beats
_MAX_BEATS = 1 << 32


def line_of(event: Event) -> str:
    """An event as a line. JSON has no nan and no infinity: such a number becomes null."""
    values = {"time": round(event.time, 3), "step": event.step, "kind": event.kind, **event.values}
    try:
        return _ENCODER.encode(values) + "\n"
    except ValueError:
        return _ENCODER.encode(finite(values)) + "\n"


def finite(value: Any) -> Any:
    """The value with None in place of each number within it that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def event_of(line: bytes) -> Event | None:
    """The event of a line. None: the line is no event, since somebody edited the file."""
    try:
        values = json.loads(line)
        if not isinstance(values["kind"], str):
            return None
        return Event(
            values.pop("kind"),
            int(values.pop("step")),
            time=float(values.pop("time")),
            values=values,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class Journal:
    """The one writer of a run's journal. RunError: the journal can't be written."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path = path
        self._descriptor = _open(path)
        self._step = 0  # of the last event
        self._events: list[Event] = []  # that are no lines yet
        self._running = RunningHash()
        self._pending = b""  # the rest of earlier lines that could not be written yet
        self._error: RunError | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._flush_now_and_then, name="journal", daemon=True
        )
        self._thread.start()

    def record(self, event: Event) -> None:
        """Write an event. A start's last line also gets the hash of all lines before it."""
        if event.kind in _ENDS:
            event = replace(event, values={**event.values, "journal": self.head().to_json()})
        with self._lock:
            self._events.append(event)  # a step's becomes a line in the thread that writes it
            self._step = event.step
        if event.kind != "step" or self._error:
            self.flush()
            self._error = None

    def flush(self) -> None:
        with self._lock:
            self._pending += "".join(map(line_of, self._events)).encode()
            self._events.clear()
            try:
                self._find_again()
                while self._pending:
                    self._pending = self._pending[os.write(self._descriptor, self._pending) :]
            except OSError as error:
                cause, remedy = explain_os_error(error, self._path)
                raise RunError(f"the journal can't be written: {cause}", remedy) from error

    def _find_again(self) -> None:
        """Restore the file if somebody removed or replaced it, and add a line that says so.

        Nothing is lost, since the earlier file is still open here.
        """
        try:
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            is_there = False
        if is_there:
            return
        text = f"{self._path.name} was removed while the run wrote it: it has been written anew"
        if not _begins_alike(self._path, self._descriptor):
            _write_anew(self._path, self._descriptor)
        else:
            text = f"{self._path.name} was replaced while the run wrote it: lines go on there"
        before, self._descriptor = self._descriptor, _open(self._path)
        os.close(before)
        self._running = RunningHash()  # of the file that is there now
        warning = line_of(Event("warned", self._step, {"text": text}))
        self._pending = warning.encode() + self._pending

    def sync(self) -> None:
        """Wait until all lines are on disk.

        It is called before a checkpoint is published, so that no checkpoint is ahead of its
        journal.
        """
        self.flush()
        os.fsync(self._descriptor)

    def head(self) -> "Head":
        """The hash of all that is written so far, by whomever, once it is on disk."""
        self.sync()
        with self._lock:
            return self._running.after(self._descriptor)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self.flush()

    def _flush_now_and_then(self) -> None:
        while not self._closed.wait(_MAX_DELAY):
            try:
                self.flush()
            except RunError as error:
                self._error = error  # unwritten lines stay pending; record() raises the error


@dataclass(frozen=True)
class Head:
    """The hash of a journal's first bytes."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)


class RunningHash:
    """The hash of a file that grows, of which each byte is read once."""

    def __init__(self) -> None:
        self._hash, self._position = hashlib.sha256(), 0

    def after(self, descriptor: int, end: int | None = None) -> Head:
        """Read on to the byte `end`; None: to the end of the last whole line."""
        rest = b""
        while end is None or self._position < end:
            most = _BLOCK if end is None else min(_BLOCK, end - self._position)
            block = os.pread(descriptor, most, self._position + len(rest))
            rest += block
            whole = len(rest) if end is not None else rest.rfind(b"\n") + 1
            self._hash.update(rest[:whole])
            self._position += whole
            rest = rest[whole:]
            if not block:
                break
        return Head(self._position, self._hash.hexdigest())


def _open(path: Path) -> int:
    """Open the file to append lines, and to read them again."""
    return regular_only(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)


def _begins_alike(path: Path, descriptor: int) -> bool:
    """Whether the file of this name is a copy of the open file, as editors make one."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return False
    return bool(first) and first == os.pread(descriptor, len(first), 0)


def _write_anew(path: Path, descriptor: int) -> None:
    """Write a file of the old name: the open file, and lines that others have added since."""
    since = path.read_bytes() if path.exists() else b""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with open(scratch, "wb") as file:
        position = 0
        while block := os.pread(descriptor, _BLOCK, position):
            file.write(block)
            position += len(block)
        file.write(since)
    scratch.replace(path)


def append_event(path: Path, event: Event) -> None:
    """Append one line from a process that is not the journal's writer.

    The launcher and the readers beside it do so.
    """
    with open(path, "ab", buffering=0, opener=regular_only) as file:
        write_all(file, line_of(event).encode())


def cut_torn_line(path: Path) -> None:
    """Cut the last line if a kill left it incomplete."""
    if not path.exists():
        return
    with open(path, "rb+", opener=regular_only) as file:
        size = file.seek(0, os.SEEK_END)
        back = min(size, _BLOCK)
        file.seek(size - back)
        tail = file.read(back)
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - back + tail.rfind(b"\n") + 1)


def last_step(path: Path) -> int:
    """The highest step in the last lines of the journal; 0: they have none."""
    return max((event.step for event in _last_events(path) if event.kind == "step"), default=0)


def has_finished(path: Path, step: int) -> bool:
    """Whether the last lines of the journal say that training finished at this step."""
    ends = [event for event in _last_events(path) if event.kind in {"finished", "resumed", "step"}]
    return bool(ends) and ends[-1].kind == "finished" and ends[-1].step == step


def _last_events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    with open(path, "rb", opener=regular_only) as file:
        file.seek(-min(file.seek(0, os.SEEK_END), _BLOCK), os.SEEK_END)
        yield from filter(None, map(event_of, file.read().split(b"\n")))


def read_events(path: Path) -> list[Event]:
    """The events that no resume made void; lines that are no events are skipped.

    A `resumed` at step s makes earlier events after step s void.
    """
    events: list[Event] = []
    resumed: float = math.inf  # the lowest step at which the run resumed later
    for event in reversed(list(events_of_file(path))):
        if event.step > resumed and event.kind in VOIDED:
            continue
        if event.kind == "resumed":
            resumed = min(resumed, event.step)
        events.append(event)
    return events[::-1]


def events_of_file(path: Path) -> Iterator[Event]:
    """All events, one by one, those too that a later resume makes void."""
    with open(path, "rb", opener=regular_only) as file:
        for line in read_lines(file):
            if line.endswith(b"\n") and (event := event_of(line)):
                yield event


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a journal. A line that is too long is cut into pieces that are no events; a hole
    in the file is passed over.
    """
    while line := file.readline(_MOST_LINE):
        yield line
        if len(line) == _MOST_LINE and not line.strip(b"\0"):
            try:
                file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
            except OSError:  # only a hole is left, or this file system knows no holes
                return


def follow(
    path: Path, stop: threading.Event, start: int = 0, pause: float = 0.1
) -> Iterator[Event]:
    """Give events as they are written, until stop is set and the file is read to its end.

    start: the byte at which to begin
    pause: seconds between reads
    """
    for events, _ in follow_batches(path, stop, start, pause):
        yield from events


def follow_batches(
    path: Path, stop: threading.Event, start: int = 0, pause: float = 0.1
) -> Iterator[tuple[list[Event], int]]:
    """Give events as follow() does: several at once, with the byte at which their lines end."""
    position, rest = start, b""
    while True:
        ending, new = stop.is_set(), b""
        if path.exists():
            with open(path, "rb", opener=regular_only) as file:
                if file.seek(0, os.SEEK_END) < position + len(rest):  # a torn line was cut
                    rest = b""
                file.seek(position + len(rest))
                new = file.read(_BLOCK)
        *lines, rest = (rest + new).split(b"\n")
        if lines:
            position += sum(map(len, lines)) + len(lines)
            yield list(filter(None, map(event_of, lines))), position
        if len(new) < _BLOCK:
            if ending:
                return
            stop.wait(pause)


class Heartbeat:
    """The writer of one rank's heartbeat, which others read while the rank works or hangs.

    Its file has sixteen mapped bytes: the step, the activity, and the number of beats.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, _HEARTBEAT.size)
        self._map = mmap.mmap(descriptor, _HEARTBEAT.size)
        os.close(descriptor)
        self._beats = 0
        self.trained = False  # whether a step has been finished
        self.activity: Activity = "start"

    def __call__(self, step: int, activity: Activity) -> None:
        self.trained = self.trained or activity == "data"
        self.activity = activity
        self._beats = (self._beats + 1) % _MAX_BEATS
        _HEARTBEAT.pack_into(self._map, 0, step, ACTIVITIES.index(activity), self._beats)


def read_beat(path: Path) -> Beat | None:
    """A rank's last beat; None: it has not begun."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != _HEARTBEAT.size:
        return None
    step, activity, beats = _HEARTBEAT.unpack(content)
    return Beat(step, ACTIVITIES[activity], beats)
