"""A job: a command that waits for devices, runs, and has ended. It is one file of JSON.

The folder in which the file lies says how far the job is; it is moved by renaming. While the job
runs, its shepherd alone writes the file.
"""

import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from samecurve.seam import Run, is_live, printable, python_module, read_file_bytes, regular_only
from samecurve_products.page.jobs.marks import mark_of, why_foreign
from samecurve_products.page.jobs.processes import ProcessName
from samecurve_products.page.journal_tail import read_tail

State = Literal["waiting", "foreign", "starting", "running", "finished", "failed", "stopped"]
Folder = Literal["waiting", "running", "done"]
ENDED = ("finished", "failed", "stopped")
_MOST_BYTES = 1 << 20
_STARTING = 60.0  # seconds in which a shepherd must have written its name
_STOPPED = {130, 143, -2, -15}  # exit codes of a command that was stopped by a signal
_TAIL_BYTES, _TAIL_LINES = 4000, 15


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, as its file has it.

    argv: the command, without a shell
    cwd: the folder in which it runs. run: the run directory that it makes; None: it makes none
    devices: the devices that it waits for, such as cuda:0, or cpu
    order: its place in the queue
    run_ended: the last word of the run's journal when the command had ended: the run may be deleted
    mark: of the user who has added it (marks.py)
    foreign: why it is not known to be this user's; '': it is
    """

    id: str
    name: str
    argv: Sequence[str]
    cwd: Path
    devices: tuple[str, ...]
    added: float
    order: int
    run: Path | None = None
    folder: Folder = "waiting"
    starter: ProcessName | None = None
    process: ProcessName | None = None
    started: float | None = None
    exit: int | None = None
    run_ended: str = ""
    ended: float | None = None
    mark: str = ""
    foreign: str = ""
    path: Path = field(default_factory=Path)  # of its file
    log: Path = field(default_factory=Path)

    @property
    def file_name(self) -> str:
        """Names sort by the order of the jobs."""
        return f"{self.order:020d}-{self.id}.json"

    def to_json(self) -> dict[str, Any]:
        """The content of the job's file."""
        values = asdict(self)
        for name in ("folder", "path", "log", "foreign"):  # what is seen where the file lies
            del values[name]
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    @property
    def command(self) -> str:
        """What is run, as somebody would type it: made from the command itself."""
        words = list(self.argv)
        own = python_module("samecurve")
        if words[: len(own)] == own:
            words = ["samecurve", *words[len(own) :]]
        return shlex.join(words)

    @property
    def marked_content(self) -> dict[str, Any]:
        """The part of the file that the user's mark stands for: what is run, and where."""
        values = self.to_json()
        return {key: values[key] for key in ("id", "name", "argv", "cwd", "devices", "run")}

    def marked(self, queue: Path) -> "Job":
        """The job with the mark of this user. UserError: the user's secret can't be used."""
        return replace(self, mark=mark_of(self.marked_content, queue), foreign="")

    @property
    def keeps_devices(self) -> bool:
        """Whether its devices and its run are taken while it goes on: a foreign job's, as long as
        its process lives. An older version may have started that one.
        """
        return not self.foreign or (self.process is not None and self.process.is_alive)

    def outcome(self) -> "Outcome":
        """The job's state now, from its file, its process and its run's journal."""
        if self.folder == "waiting" and self.foreign:
            words = f"{self.foreign}; `samecurve queue accept {self.id}` shows what it would run"
            return Outcome("foreign", words)
        if self.folder == "waiting":
            return Outcome("waiting")
        if self.exit is not None:
            return self._ended(self.exit)
        if self.process and self.process.is_alive:
            return Outcome(self._begun())
        if self.run and is_live(Run(self.run)):  # its shepherd was killed, the run goes on
            return Outcome("running")
        if self.process:
            return self._lost()
        is_given_up = self.starter is not None and not self.starter.is_alive
        if not is_given_up and time.time() - self._moved() < _STARTING:
            return Outcome("starting")
        return Outcome("failed", "it was not started: whatever was to start it has ended")

    def _moved(self) -> float:
        """When it was taken from the queue: its file was moved or written then."""
        try:
            return self.path.stat().st_ctime
        except OSError:
            return self.added

    def _begun(self) -> State:
        """Whether the command's run has begun; a command without a run has."""
        return "running" if self.run is None or Run(self.run).journal.exists() else "starting"

    def _ended(self, code: int) -> "Outcome":
        end = self.run_ended or self._journal_end()
        if code in _STOPPED or (code == 0 and end == "stopped"):
            return Outcome("stopped")
        if code == 0:
            return Outcome("finished")
        if code < 0:
            return Outcome("failed", f"it was ended by signal {-code}")
        return Outcome("failed", f"it ended with exit code {code}")

    def _lost(self) -> "Outcome":
        """The outcome where nobody noted an exit code: after a restart of the machine, a kill."""
        match self._journal_end():
            case "finished":
                return Outcome("finished")
            case "stopped":
                return Outcome("stopped")
        words = "its process has ended without a word: it was killed, or the machine was restarted"
        return Outcome("failed", words)

    def _journal_end(self) -> str:
        return "" if self.run is None else journal_end(self.run)

    def log_tail(self) -> str:
        """The last lines that the command has printed."""
        try:
            with open(self.log, "rb", opener=regular_only) as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        lines = [printable(line) for line in text.splitlines()]
        return "\n".join(lines[-_TAIL_LINES:])


@dataclass(frozen=True)
class Outcome:
    """A job's state, and why, where that needs words."""

    state: State
    why: str = ""


def journal_end(run: Path) -> str:
    """How a run ended, as its journal says: finished, stopped; '': it does not, or is gone."""
    try:
        return read_tail(Run(run).journal).end
    except OSError:
        return ""


def read_job(path: Path, folder: Folder) -> Job | None:
    """The job of a file in a queue's folder; None: it is gone, or no job."""
    queue = path.parents[1]
    log = queue / "logs" / f"{path.stem.partition('-')[2]}.log"
    try:
        values = json.loads(read_file_bytes(path, _MOST_BYTES))
        job = _of_json(values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    foreign = why_foreign(job.mark, job.marked_content, queue)
    return replace(job, folder=folder, path=path, log=log, foreign=foreign)


def _of_json(values: Mapping[str, Any]) -> Job:
    """ValueError, KeyError, TypeError, OverflowError: the values are no job's."""
    argv = [_text(word) for word in values["argv"]]
    job_id = str(values["id"])
    if not argv or not (job_id.isascii() and job_id.isalnum()):
        raise ValueError("no command, or no id")
    return Job(
        id=job_id,
        name=_text(values["name"]),
        argv=argv,
        cwd=Path(_text(values["cwd"])),
        devices=tuple(_text(device) for device in values["devices"]),
        added=_finite(values["added"]),
        order=int(values["order"]),
        run=Path(_text(values["run"])) if values.get("run") else None,
        starter=ProcessName.of_json(values.get("starter")),
        process=ProcessName.of_json(values.get("process")),
        started=_time(values.get("started")),
        exit=None if values.get("exit") is None else int(values["exit"]),
        run_ended=str(values.get("run_ended") or ""),
        ended=_time(values.get("ended")),
        mark=str(values.get("mark") or ""),
    )


def _text(value: Any) -> str:
    """A text that a command or a path may have. ValueError: a zero byte, half a character."""
    text = str(value)
    if b"\0" in os.fsencode(text):
        raise ValueError("a zero byte")
    return text


def _time(value: Any) -> float | None:
    return None if value is None else _finite(value)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("no finite number")
    return number
