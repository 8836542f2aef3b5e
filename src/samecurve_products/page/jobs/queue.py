"""The queue: a plain directory of job files, waiting/, running/ and done/.

A job moves by one rename, so that it is in one place whatever is killed when. Any process may add,
list, move and remove jobs; one at a time starts them (work.py).
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from subprocess import DEVNULL
from typing import Any, Literal

from samecurve.processes import OUTLIVES
from samecurve.seam import Call, UserError, explain_os_error, how_ended, start_process, write_json
from samecurve_products.page.jobs.busy import Devices, device_words
from samecurve_products.page.jobs.job import ENDED, Folder, Job, read_job
from samecurve_products.page.jobs.processes import ProcessName

QUEUE = "queue"  # the directory, in the folder where runs are started
_FOLDERS: tuple[Folder, ...] = ("waiting", "running", "done")
_MOST_DONE = 100  # jobs whose files are kept
_SHEPHERD = "samecurve_products.page.jobs.shepherd"
_NOT_STARTED = 127  # the exit code of a command that can't be started


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job that is to be added. Fields as Job."""

    name: str
    argv: Sequence[str]
    cwd: Path
    devices: tuple[str, ...]
    run: Path | None = None


class Queue:
    """The jobs of a directory."""

    def __init__(self, home: Path) -> None:
        """UserError: the directory is there, and is none of a queue."""
        self.home = home
        self.lock = home / "lock"
        if home.is_dir() and any(home.iterdir()) and not (home / "waiting").is_dir():
            raise UserError(
                f"{home} is there, and is no queue of jobs", "--queue DIR names another", "--queue"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process and thread from holding the queue in the block.

        So what was looked up there, such as the name of a new run, still holds when a job is added.
        """
        self.make_folders()
        waiting = os.open(self.home / "waiting", os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(waiting, fcntl.LOCK_EX)
            yield
        finally:
            os.close(waiting)

    def free_run(self, name: str, runs: Path) -> str:
        """NAME-TIME, which is neither a run in the directory `runs` nor that of a job."""
        existing = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
        existing |= {job.run.name for job in self.jobs() if job.run}
        base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = [base, *(f"{base}-{number}" for number in range(2, 1000))]
        return next(candidate for candidate in names if candidate not in existing)

    def add(self, new: NewJob) -> Job:
        """Put a job at the end of the queue."""
        return self._write(new, "waiting")

    def start(self, new: NewJob) -> Job:
        """Start a job at once, whatever the devices are busy with."""
        job = self._write(new, "running", starter=ProcessName.own())
        self._spawn(job)
        return job

    def accept(self, job: Job) -> Job:
        """Mark a foreign job as the user's own, as it was read: it is started in its turn.

        UserError: it waits no more, or its mark can't be made.
        """
        if job.folder != "waiting" or not job.path.exists():
            raise UserError(
                f"job {job.name} does not wait any more", "`samecurve queue list`", "JOB"
            )
        accepted = job.marked(self.home)
        with self._explained():
            write_json(job.path, accepted.to_json())
        return accepted

    def jobs(self) -> list[Job]:
        """All jobs: those that run, those that wait in their order, the last ones that ended."""
        # a job that moves on meanwhile is seen in two folders: the later one counts
        jobs = {job.id: job for folder in _FOLDERS for job in self._in(folder)}.values()
        by_folder = {name: [job for job in jobs if job.folder == name] for name in _FOLDERS}
        done = sorted(by_folder["done"], key=lambda job: job.ended or job.added, reverse=True)
        return [*by_folder["running"], *by_folder["waiting"], *done]

    def broken(self) -> list[Path]:
        """The files that wait in the queue and are no job."""
        folder = self.home / "waiting"
        files = [] if folder.is_symlink() else sorted(folder.glob("*.json"))
        return [file for file in files if not read_job(file, "waiting") and file.exists()]

    def find(self, job_id: str) -> Job:
        """The job of an id, of a name, or of the beginning of an id, whichever comes first.

        UserError: there is none, or there are several.
        """
        jobs = self.jobs()
        alike = (
            [job for job in jobs if job.id == job_id]
            or [job for job in jobs if job.name == job_id]
            or [job for job in jobs if job.id.startswith(job_id)]
        )
        if len(alike) == 1:
            return alike[0]
        if alike:
            names = ", ".join(job.id for job in alike)
            raise UserError(f"{job_id} is several jobs", f"one of their ids: {names}", "JOB")
        raise UserError(f"there is no job {job_id}", "`samecurve queue list` shows all", "JOB")

    def remove(self, job: Job) -> None:
        """Remove a job that waits, or the record of one that has ended. UserError: it runs."""
        if job.folder == "running" and job.outcome().state not in ENDED:
            raise UserError(
                f"job {job.name} runs: removing it would not stop it",
                "stop its run first (its page, or Ctrl-C's signal to its process)",
                "JOB",
            )
        try:
            job.path.unlink()
        except FileNotFoundError:
            raise UserError(
                f"job {job.name} has moved on meanwhile", "`samecurve queue list`", "JOB"
            ) from None
        job.log.unlink(missing_ok=True)

    def move(self, job: Job, direction: Literal["up", "down"]) -> None:
        """Swap a waiting job with its neighbour. A job at the end stays where it is."""
        waiting = self._in("waiting")
        place = next((n for n, other in enumerate(waiting) if other.id == job.id), None)
        if place is None:
            raise UserError(f"job {job.name} does not wait any more", "load the list again", "JOB")
        neighbour = place + (-1 if direction == "up" else 1)
        if not 0 <= neighbour < len(waiting):
            return
        other, job = waiting[neighbour], waiting[place]
        # two renames; between them both have one order, and the ids decide
        self._reorder(job, other.order)
        self._reorder(other, job.order)

    def _reorder(self, job: Job, order: int) -> None:
        moved = replace(job, order=order)
        with suppress(FileNotFoundError):  # it was started meanwhile
            job.path.rename(job.path.with_name(moved.file_name))

    def settle(self) -> None:
        """Move the jobs that have ended to done/. Any process may, at any time."""
        for job in self._in("running"):
            if job.outcome().state in ENDED:
                with suppress(FileNotFoundError):
                    job.path.rename(self.home / "done" / job.path.name)
        for job in sorted(self._in("done"), key=lambda job: job.ended or job.added)[:-_MOST_DONE]:
            job.path.unlink(missing_ok=True)
            job.log.unlink(missing_ok=True)

    def start_next(self, devices: Devices) -> list[Job]:
        """Start each job whose devices are free, and wanted by no earlier one.

        To be called by the one process that works on the queue.
        """
        begun = []
        for job, hinders in self.waiting(devices):
            if hinders or job.foreign:
                continue
            claimed = self._claim(job)
            if claimed is not None:
                self._spawn(claimed)
                begun.append(claimed)
        return begun

    def waiting(self, devices: Devices) -> list[tuple[Job, str]]:
        """The waiting jobs, each with what it waits for in words; '': nothing.

        A foreign job waits for nothing, and keeps no devices while it waits.
        """
        taken = devices.busy([job for job in self._in("running") if job.keeps_devices])
        rows = []
        for job in self._in("waiting"):
            if job.foreign:
                rows.append((job, ""))
                continue
            holders = {taken[device] for device in job.devices if device in taken}
            rows.append((job, _waits_for(job, taken) if holders else ""))
            for device in job.devices:
                taken.setdefault(device, f"job {job.name}, which comes first")
        return rows

    def _claim(self, job: Job) -> Job | None:
        """Take a job out of the waiting ones; None: it was removed meanwhile."""
        starting = replace(job, starter=ProcessName.own(), folder="running")
        path = self.home / "running" / job.path.name
        try:
            job.path.rename(path)
        except FileNotFoundError:
            return None
        starting = replace(starting, path=path)
        write_json(path, starting.to_json())
        return starting

    def _spawn(self, job: Job) -> None:
        """Start the shepherd of a job, in a session of its own."""
        try:
            with open(job.log, "ab") as log:
                path, file = str(job.path.resolve()), log.fileno()
                call = Call(_SHEPHERD, (path,), new_session=True, ended_by=OUTLIVES)
                starts = start_process(call, stdin=DEVNULL, stdout=file, stderr=file, cwd=job.cwd)
                if code := starts.wait():
                    raise OSError(f"its shepherd ended with {how_ended(code)}")
        except OSError as error:
            now = time.time()
            with suppress(OSError), open(job.log, "a") as log:
                log.write(f"it can't be started: {error}\n")
            write_json(job.path, replace(job, exit=_NOT_STARTED, started=now, ended=now).to_json())

    def _write(self, new: NewJob, folder: Folder, starter: ProcessName | None = None) -> Job:
        """Write the file of a new job, with the user's mark. UserError: it can't be written."""
        job = Job(
            id=token_hex(6),
            name=new.name,
            argv=list(new.argv),
            cwd=new.cwd.resolve(),
            devices=new.devices,
            added=time.time(),
            order=time.time_ns(),
            run=new.run,
            folder=folder,
            starter=starter,
        )
        self.make_folders()
        job = job.marked(self.home)
        path = self.home / folder / job.file_name
        with self._explained():
            write_json(path, job.to_json())
        return replace(job, path=path, log=self.home / "logs" / f"{job.id}.log")

    def make_folders(self) -> None:
        """Make the folders that are missing. UserError: one is a link, or can't be made."""
        with self._explained():
            for name in (*_FOLDERS, "logs"):
                self._check_folder(name)
                (self.home / name).mkdir(parents=True, exist_ok=True)

    def _check_folder(self, name: str) -> None:
        """UserError: a folder of the queue is a link, so that the queue leads elsewhere."""
        if (self.home / name).is_symlink():
            raise UserError(
                f"{self.home / name} is a link, and a queue has folders of its own alone",
                f"`rm {self.home / name}`; or another queue (--queue DIR)",
                "--queue",
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """UserError in place of OSError: the queue can't be written."""
        try:
            yield
        except OSError as error:
            cause, remedy = explain_os_error(error, self.home, "add the job again")
            raise UserError(cause, remedy, "--queue") from None

    def _in(self, folder: Folder) -> list[Job]:
        jobs: list[Job] = []
        if (self.home / folder).is_symlink():
            return jobs
        for path in sorted((self.home / folder).glob("*.json")):
            job = read_job(path, folder)
            if job is not None:
                order = path.stem.partition("-")[0]  # a rename may have given it another place
                jobs.append(replace(job, order=int(order)) if order.isdigit() else job)
        return jobs


def _waits_for(job: Job, taken: Mapping[str, str]) -> str:
    """'waits for GPU 0: run tiny-1 uses it'."""
    by_holder: dict[str, list[str]] = {}
    for device in job.devices:
        if device in taken:
            by_holder.setdefault(taken[device], []).append(device)
    parts = [f"{device_words(devices)} ({holder})" for holder, devices in by_holder.items()]
    return f"waits for {', '.join(parts)}"


def job_rows(
    queue: Queue, devices: Devices, run_id: Callable[[Path], str | None] | None = None
) -> list[dict[str, Any]]:
    """The jobs as the page and `queue list --json` have them.

    run_id: the id of a run directory, for the page
    """
    reasons = {job.id: why for job, why in queue.waiting(devices)}
    return [job_row(job, reasons.get(job.id, ""), run_id) for job in queue.jobs()]


def job_row(job: Job, why: str, run_id: Callable[[Path], str | None] | None) -> dict[str, Any]:
    """A job as the page has it. why: what it waits for"""
    outcome = job.outcome()
    row: dict[str, Any] = {
        "id": job.id,
        "name": job.name,
        "state": outcome.state,
        "command": job.command,
        "devices": device_words(job.devices),
        "added": job.added,
    }
    if job.started is not None:
        row["started"] = job.started
    if job.ended is not None:
        row["ended"] = job.ended
    if job.run is not None:
        identity = run_id(job.run) if run_id else str(job.run)
        if identity:
            row["run_id" if run_id else "run"] = identity
    if outcome.state == "failed" and (tail := job.log_tail()):
        row["log_tail"] = tail
    if outcome.why or why:
        row["why"] = outcome.why or why
    return row
