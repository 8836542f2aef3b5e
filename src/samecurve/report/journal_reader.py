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
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from samecurve.core.events import Event
from samecurve.core.system.files import regular_only
from samecurve.observe.journal import VOIDED, event_of
from samecurve.report.record import EvenEvents, RunRecord, Start, Totals, as_mapping
from samecurve.report.steps import Offsets, Steps, Table, number
from samecurve.units import counted

_BATCH = 1 << 18  # bytes of lines that are parsed at once
_MAX_STEPS = 1 << 53  # a float can't hold larger integers exactly
_MAX_LINE = 1 << 26  # bytes; a longer line is passed over in pieces
_MAX_EVENT = 1 << 22  # bytes of a line whose event is kept
_MAX_NOTABLE = 2000
_MAX_STARTS = 1000
_NOTABLE = {"resumed", "restarted", "warned", "slow", "finished", "stopped", "failed"}
_REAL = {int, float}
_HEAD = 4096  # bytes by which a journal is known again
_STATE = 1  # number of this form of a saved state

Values = dict[str, Any]  # a line of the journal


class JournalReader:
    """What a journal says so far. `content` holds it, in a record without plan and config."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.content = RunRecord(directory=self._path.parent, live=False)
        self.plan: Mapping[str, object] = {}  # of the last start that has one
        self.position = 0  # byte up to which the journal was read
        self.size = 0  # of the journal, when it was last read
        self.error = ""  # why it can't be read
        self._num_strange = 0
        self._first_line = b""  # its hash: whose state this is
        self._inode = 0
        self._event_at = 0  # byte of the last event that is no step
        self._highest = 0  # step of an event that a later `resumed` may make void
        self._read_again_bytes = 0

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
        about = os.fstat(file.fileno())
        first_line = _first_line_hash(file)
        is_other = self._first_line and first_line != self._first_line
        if is_other or about.st_size < self.position or about.st_ino != self._inode:
            self._begin_anew()
            self._inode = about.st_ino
        self.size = about.st_size
        if not self._first_line and first_line:
            self._first_line = first_line
            self.content.identity = first_line.hex()

    def _read_from(self, file: BinaryIO, most_bytes: int | None) -> bool:
        file.seek(self.position)
        stop = math.inf if most_bytes is None else self.position + most_bytes
        rest = bytearray()  # of a line whose end is not read yet
        while block := file.read(_BATCH):
            rest += block
            if b"\n" in block:
                whole, _, after = rest.rpartition(b"\n")
                self._add_lines(bytes(whole).split(b"\n"))
                self.position += len(whole) + 1
                rest = after
            elif len(rest) >= _MAX_LINE:
                self._num_strange += 1
                self._pass_over(file, rest)
                rest = bytearray()
            if self.position >= stop:
                return False
        return True

    def _pass_over(self, file: BinaryIO, piece: bytearray) -> None:
        """Go on behind a piece of a line that is too long, and behind a hole."""
        self.position += len(piece)
        if not any(piece):
            with suppress(OSError):  # only a hole is left, or this file system knows no holes
                self.position = file.seek(os.lseek(file.fileno(), self.position, os.SEEK_DATA))

    def _add_lines(self, lines: list[bytes]) -> None:
        """Add the lines that begin at the position."""
        values = _parsed(lines)
        offsets = self.position + np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
        are_steps = [type(each) is dict and each.get("kind") == "step" for each in values]
        first = 0
        for is_step, group in groupby(are_steps):
            last = first + len(list(group))
            if not is_step or not self._add_steps(values[first:last], offsets[first:last]):
                for line, offset in zip(lines[first:last], offsets[first:last], strict=True):
                    self._add_line(line, int(offset))
            first = last

    def _add_steps(self, steps: list[Any], offsets: Offsets) -> bool:
        """Add steps, if each has a step and a time that are plain numbers."""
        types = {type(step.get("step")) for step in steps}
        if types != {int} or not _REAL.issuperset(type(step.get("time")) for step in steps):
            return False
        rows = self.content.steps.rows_of(steps)
        if not (np.isfinite(rows[:, :2]).all() and np.abs(rows[:, 0]).max() < _MAX_STEPS):
            return False
        if not self.content.starts:
            self._begin_start(float(rows[0, 1]), int(rows[0, 0]), {}, {})
        start = self.content.starts[-1]
        start.last_time = max(start.last_time, float(rows[:, 1].max()))
        start.last_step = int(rows[-1, 0])
        self._highest = max(self._highest, int(rows[:, 0].max()))
        self.content.counts["step"] += len(steps)
        self.content.steps.add(rows, offsets)
        return True

    def _add_line(self, line: bytes, offset: int) -> None:
        if len(line) <= _MAX_EVENT:
            event = event_of(line)
            if event and math.isfinite(event.time) and abs(event.step) < _MAX_STEPS:
                self._add(event, offset)
                return
        elif b'"kind": "hashed"' in line[:200]:
            return
        self._num_strange += 1

    def _add(self, event: Event, offset: int) -> None:
        content = self.content
        self._event_at = offset
        self._begin_start_with(event)
        start = content.starts[-1]
        start.last_time = max(start.last_time, event.time)
        start.last_step = event.step
        content.counts[event.kind] += 1
        if event.kind in VOIDED:
            self._highest = max(self._highest, event.step)
        self._keep(event)
        match event.kind:
            case "step":  # its step or time is no plain number
                values = {**event.values, "step": event.step, "time": event.time}
                content.steps.add(content.steps.rows_of([values]), np.array([offset]))
            case "started":
                start.training_since = event.time
            case "resumed":
                self._void_beyond(event.step)
            case "evaluated":
                self._add_evaluation(event)
            case "saved":
                content.totals.saving += number(event.values.get("blocked_seconds"), 0.0)
            case "finished" | "stopped" | "failed":
                start.end, start.end_values = event.kind, event.values

    def _keep(self, event: Event) -> None:
        """Keep an event that a page shows, in bounded lists."""
        content = self.content
        if event.kind in _NOTABLE:
            content.notable.append(event)
            if len(content.notable) > _MAX_NOTABLE:
                del content.notable[_MAX_NOTABLE // 2]
        elif event.kind in {"sampled", "sensors"}:
            _even_events(content)[event.kind].add(event)
        elif event.kind == "tested":
            content.tested = event

    def _begin_start_with(self, event: Event) -> None:
        """Add a start if the event begins one. A restart has the plan of the start before it."""
        starts = self.content.starts
        if event.kind == "planned" or not starts:
            plan = as_mapping(event.values.get("plan"))
            environment = as_mapping(event.values.get("environment"))
            self._begin_start(event.time, event.step, plan, environment)
        elif event.kind == "restarted":
            last = starts[-1]
            self._append_start(
                replace(
                    last,
                    time=event.time,
                    step=event.step,
                    training_since=None,
                    end="",
                    end_values={},
                    last_time=event.time,
                    last_step=event.step,
                )
            )

    def _begin_start(
        self,
        time: float,
        step: int,
        plan: Mapping[str, object],
        environment: Mapping[str, object],
    ) -> None:
        if plan:
            self.plan = plan
        self.content.environment = environment
        self._append_start(
            Start(
                time=time,
                step=step,
                how=f"{plan.get('engine', '')} {plan.get('strategy', '')}".strip(),
                devices=device_names(plan),
                last_time=time,
                last_step=step,
            )
        )

    def _append_start(self, start: Start) -> None:
        starts, totals = self.content.starts, self.content.totals
        starts.append(start)
        totals.starts += 1
        if len(starts) > _MAX_STARTS:
            old = starts.pop(_MAX_STARTS // 2)
            totals.wall += old.wall_seconds
            totals.starting += old.starting_seconds

    def _add_evaluation(self, event: Event) -> None:
        content = self.content
        content.totals.evaluating += number(event.values.get("seconds"), 0.0)
        content.evaluated.add(event)
        content.best = min(filter(None, (content.best, event)), key=_loss)

    def _void_beyond(self, step: int) -> None:
        """Remove the steps after `step`: a resume repeated them or gave them up."""
        content = self.content
        if self._highest <= step:
            return
        self._highest = step
        content.evaluated.void_beyond(step)
        content.sampled.void_beyond(step)
        if content.best and content.best.step > step:
            content.best = min(content.evaluated, key=_loss, default=None)
        count, seconds = content.steps.truncate(step, self._read_again)
        content.totals.voided_steps += count
        content.totals.voided += seconds

    def _read_again(self, begin: int, end: int | None) -> tuple[Table, Offsets]:
        """Read the steps of a part of the journal again.

        A journal that wants more than twice itself read again is damaged: it gets no steps.
        """
        steps = self.content.steps
        end = self._event_at if end is None else end
        self._read_again_bytes += end - begin
        if self._read_again_bytes > 2 * self.size + _BATCH:
            return steps.rows_of([]), np.zeros(0, np.int64)
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
        rows = steps.rows_of([values for values, _ in kept])
        return rows, np.array([offset for _, offset in kept], np.int64)

    def faults(self, *, live: bool) -> list[str]:
        """What could not be read. live: an unfinished last line is being written."""
        if self.error:
            return [f"journal.jsonl can't be read: {self.error}; there are no curves"]
        count = self._num_strange + (self.position < self.size and not live)
        if not count:
            return []
        are = "is" if count == 1 else "are"
        return [
            f"journal.jsonl: {counted(count, 'line')} passed over that {are} no event"
            " (damaged, or cut off by a kill)"
        ]

    # -- saving

    def save(self, path: Path) -> None:
        """Write the whole state to a file, whole or not at all. OSError: it can't be written."""
        content = self.content
        state = {
            "form": _STATE,
            "first_line": self._first_line.hex(),
            "inode": self._inode,
            "position": self.position,
            "num_strange": self._num_strange,
            "highest": self._highest,
            "plan": self.plan,
            "environment": content.environment,
            "counts": content.counts,
            "totals": asdict(content.totals),
            "starts": [asdict(start) for start in content.starts],
            "notable": content.notable,
            "best": content.best,
            "tested": content.tested,
            "even": {
                name: {"events": list(events), "every": events.every, "seen": events.seen}
                for name, events in _even_events(content).items()
            },
        }
        text = json.dumps(state, default=asdict).encode()
        scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with open(scratch, "wb") as file:
                arrays: dict[str, Any] = {"state": np.frombuffer(text, np.uint8)}
                arrays |= content.steps.to_arrays()
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
        content.identity = state["first_line"]
        self._first_line = bytes.fromhex(state["first_line"])
        self._inode, self.position = state["inode"], state["position"]
        self._num_strange, self._highest = state["num_strange"], state["highest"]
        self.plan, content.environment = state["plan"], state["environment"]
        content.counts.update(state["counts"])
        content.totals = Totals(**state["totals"])
        content.starts = [Start(**start) for start in state["starts"]]
        content.notable = [Event(**event) for event in state["notable"]]
        content.best, content.tested = (
            Event(**state[name]) if state[name] else None for name in ("best", "tested")
        )
        for name, events in _even_events(content).items():
            kept = state["even"][name]
            restored = [Event(**event) for event in kept["events"]]
            events.restore(restored, kept["every"], kept["seen"])


def _even_events(content: RunRecord) -> dict[str, EvenEvents]:
    return {
        "evaluated": content.evaluated,
        "sampled": content.sampled,
        "sensors": content.sensors,
    }


def _parsed(lines: list[bytes]) -> list[Any]:
    """The value of each line; None: it is no JSON, or too long."""
    if max(map(len, lines)) <= _MAX_EVENT:
        try:
            values = json.loads(b"[%b]" % b",".join(lines))  # half the time of a call for each line
        except (ValueError, RecursionError):
            values = []
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


def _first_line_hash(file: BinaryIO) -> bytes:
    """The hash of the first line's first bytes; b"": it is not whole yet."""
    head, end, _ = file.read(_HEAD).partition(b"\n")
    return hashlib.sha256(head).digest() if end or len(head) == _HEAD else b""


def _loss(evaluated: Event) -> float:
    return number(evaluated.values.get("loss"), math.inf)


def device_names(plan: Mapping[str, object]) -> str:
    """The plan's devices: '2 x NVIDIA H100'."""
    return ", ".join(f"{count} x {name}" for name, count in devices(plan).items())


def devices(plan: Mapping[str, object]) -> Counter[str]:
    """The devices' names, each with its number of devices."""
    entries = plan.get("devices")
    if not isinstance(entries, list):
        return Counter()
    return Counter(str(as_mapping(entry).get("name")) for entry in entries)
