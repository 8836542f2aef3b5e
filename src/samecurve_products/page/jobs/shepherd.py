"""The process beside a job: it starts the job's command, waits for it, and notes how it ended.

It lives as long as the command, whatever becomes of the server or the worker that started it, and
is no child of theirs. A signal to it is passed on to the command.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from samecurve.seam import start_program, write_json
from samecurve_products.page.jobs.job import journal_end, read_job
from samecurve_products.page.jobs.processes import ProcessName

_NOT_STARTED = 127  # the exit code where the command can't be started


def main(file: str) -> None:
    """Leave a process that runs the job. This one ends once the job's file names that process.

    A job without this user's mark is not run.
    """
    path = Path(file)
    job = read_job(path, "running")
    if job is None or job.foreign:
        sys.exit(f"{path} is not run: {job.foreign if job else 'it is no job'}")
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        named = os.read(reading, 1)
        os._exit(0 if named else 1)
    os.close(reading)
    job = replace(job, process=ProcessName.own(), started=time.time())
    write_json(path, job.to_json())
    os.write(writing, b"1")
    os.close(writing)
    code = _run(job.argv)
    run_ended = journal_end(job.run) if job.run else ""
    write_json(path, replace(job, exit=code, run_ended=run_ended, ended=time.time()).to_json())


def _run(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit code; of a signal, minus its number."""
    try:
        child = start_program(argv)
    except OSError as error:
        print(f"{argv[0]} can't be started: {error.strerror}", file=sys.stderr, flush=True)
        return _NOT_STARTED

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    return child.wait()
