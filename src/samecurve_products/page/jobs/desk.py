"""The server's side of jobs and forms: its queue, the thread that works on it, the plan worker.

The queue lies below the first root. Ending the desk ends no job.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from samecurve.seam import Devices as DevicesSection
from samecurve.seam import UserError, choose_devices, probe, python_module
from samecurve_products.page.form.plan_worker import PlanWorker
from samecurve_products.page.jobs.busy import Devices
from samecurve_products.page.jobs.job import ENDED, Job
from samecurve_products.page.jobs.queue import QUEUE, NewJob, Queue, job_row, job_rows
from samecurve_products.page.jobs.work import WorkerThread, has_worker
from samecurve_products.page.roots import Catalogue

Row = dict[str, Any]


class JobCommand(NamedTuple):
    """A command that is started as a job."""

    arguments: Sequence[str]  # what follows `samecurve`
    name: str
    folder: Path  # where it is started
    devices: str  # as --devices has them; '': those of the config, which are not known here
    run: Path | None = None  # the run directory that it trains in


class Desk:
    """Starts and queues runs for one server."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.roots = [root.path for root in catalogue.roots]
        self._worker = PlanWorker(self.roots)
        self._devices = Devices(self._homes)
        self._thread: WorkerThread | None = None
        self._kept: Queue | None = None

    def begin(self) -> None:
        """Begin to work on the queue."""
        with suppress(UserError):  # who adds a job is told
            self._thread = WorkerThread(self._queue(), self._devices)
            self._thread.start()

    def end(self) -> None:
        """Stop working on the queue, and end the plan worker. Jobs go on."""
        if self._thread:
            self._thread.stop()
        self._worker.close()

    def ask(self, verb: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """An answer of the plan worker. PlanRefusedError: it refuses the request."""
        return self._worker.ask(verb, request)

    def rows(self) -> list[Row]:
        """The jobs, as the page has them."""
        try:
            return job_rows(self._queue(), self._devices, self._run_id)
        except UserError:  # there is no queue
            return []

    def is_paused(self) -> bool:
        """Whether nothing works on the queue."""
        return self._thread is None and not has_worker(self._queue())

    def submit(self, request: Mapping[str, Any], *, at_once: bool) -> Row:
        """Start a draft, or put it into the queue. PlanRefusedError: it has errors."""
        queue = self._queue()
        answer = self.ask("start", request)
        name, home = answer["name"], Path(answer["home"])
        with queue.held():
            run = f"runs/{queue.free_run(name, home / 'runs')}"
            arguments = [*answer["arguments"], "--save-dir", run, "--resume", "never"]
            new = NewJob(
                name=name,
                argv=python_module("samecurve", *arguments),
                cwd=home,
                devices=tuple(answer["devices"]),
                run=home / run,
            )
            return self._row(queue.start(new) if at_once else queue.add(new))

    def jobs(self) -> list[Job]:
        """The jobs; none, where there is no queue."""
        try:
            return self._queue().jobs()
        except UserError:
            return []

    def start_command(self, command: JobCommand) -> Row:
        """Start a command of our own program at once, such as the resume of a run.

        UserError: a job that goes on trains in the same run.
        """
        section = DevicesSection(use=command.devices or "auto")
        places = [device.place for device in choose_devices(section, "torch", probe()).value]
        new = NewJob(
            name=command.name,
            argv=python_module("samecurve", *command.arguments),
            cwd=command.folder,
            devices=tuple(dict.fromkeys(places)),
            run=command.run,
        )
        queue = self._queue()
        with queue.held():
            jobs = [job for job in queue.jobs() if job.keeps_devices]
            runs = {job.run for job in jobs if job.outcome().state not in ENDED}
            if command.run in runs - {None}:
                raise UserError(
                    "a job of this run goes on, or waits",
                    "see the queue in the list of runs",
                    "RUN",
                )
            return self._row(queue.start(new))

    def remove(self, job_id: str) -> None:
        """UserError: there is no such job, or it runs."""
        queue = self._queue()
        queue.remove(queue.find(job_id))

    def move(self, job_id: str, direction: Literal["up", "down"]) -> None:
        """UserError: there is no such job, or it does not wait."""
        queue = self._queue()
        queue.move(queue.find(job_id), direction)

    def _queue(self) -> Queue:
        """The queue. UserError: a directory of that name is something else."""
        if self._kept is None:
            self._kept = Queue(self.roots[0] / QUEUE)
        return self._kept

    def _homes(self) -> list[Path]:
        return [listed.home for listed in self._catalogue.runs().values()]

    def _run_id(self, home: Path) -> str | None:
        """The id of a run that is there already; None: it has not begun."""
        runs = self._catalogue.runs().values()
        return next((listed.id for listed in runs if listed.home == home), None)

    def _row(self, job: Job) -> Row:
        self._catalogue.look_again()
        return job_row(job, "", self._run_id)
