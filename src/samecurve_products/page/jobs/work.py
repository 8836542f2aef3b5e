"""Working on a queue: one process at a time starts the jobs whose devices are free.

A worker that ends, however it ends, stops no job: the next one finds those that run.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from samecurve.run.directory import is_locked
from samecurve.seam import UserError, regular_only
from samecurve_products.page.jobs.busy import Devices
from samecurve_products.page.jobs.job import Job
from samecurve_products.page.jobs.queue import Queue

_LOOK = 0.5  # seconds between two looks at the queue
_LOCK_AGAIN = 2.0  # seconds until the lock, which another worker holds, is tried again


@contextmanager
def working(queue: Queue, what: str) -> Iterator[None]:
    """Be the queue's one worker in the block. what: this process, in words.

    UserError: another process works on the queue, or its folders can't be made.
    """
    queue.make_folders()
    with open(queue.lock, "a+", opener=regular_only) as file:
        if not _lock(file):
            raise UserError(
                f"{queue.home} has a worker already: {_holder(file)}",
                "jobs that are added to it run there; or end that worker first",
                "--queue",
            )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "what": what}))
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(file: TextIO) -> str:
    """The worker that holds the lock, in words."""
    file.seek(0)
    try:
        values = json.loads(file.read(1 << 12))
        return f"{values['what']}, process {values['pid']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def has_worker(queue: Queue) -> bool:
    """Whether a process works on the queue."""
    return is_locked(queue.lock)


def work(
    queue: Queue,
    devices: Devices,
    *,
    forever: bool = False,
    say: Callable[[str, Job], None] = lambda _what, _job: None,
) -> int:
    """Start jobs until none is left. Returns how many of the jobs that ended have failed.

    Foreign jobs stay where they are. To be called within working().

    forever: go on waiting for new jobs
    say: is told of each job that begins (`started`) and ends (its state)
    """
    failed = 0
    known: dict[str, Job] = {}
    while True:
        jobs = {job.id: job for job in queue.jobs()}
        for job_id in [job_id for job_id in known if job_id in jobs]:
            state = jobs[job_id].outcome().state
            if state in {"finished", "failed", "stopped"}:
                failed += state == "failed"
                say(state, jobs[job_id])
                del known[job_id]
        queue.settle()
        for job in queue.start_next(devices):
            say("started", job)
        left = [job for job in queue.jobs() if job.folder != "done" and not job.foreign]
        known |= {job.id: job for job in left if job.folder == "running"}
        if not left and not forever:
            return failed
        time.sleep(_LOOK)


class WorkerThread:
    """The queue's worker inside the page's server, for as long as the server lives.

    While another process works on the queue, it waits for the lock.
    """

    def __init__(self, queue: Queue, devices: Devices) -> None:
        self._queue, self._devices = queue, devices
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; jobs go on."""
        self._ending.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._ending.is_set():
            if not (self._queue.home / "waiting").is_dir():  # nobody has added a job yet
                self._ending.wait(_LOOK)
                continue
            try:
                with working(self._queue, "the page of `samecurve ui`"):
                    while not self._ending.wait(_LOOK):
                        self._queue.settle()
                        self._queue.start_next(self._devices)
            except (UserError, OSError):  # another worker, or a disk that fails: try again
                self._ending.wait(_LOCK_AGAIN)
