"""The process beside a job: it starts the job's command, waits for it, and notes how it ended.

It lives as long as the command, whatever becomes of the server or the worker that started it, and
is no child of theirs. A signal to it is passed on to the command.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from samecurve.core.system.files import write_json
from samecurve.ui.jobs.processes import ProcessName

_NOT_STARTED = 127  # the exit code where the command can't be started


def main(file: str) -> None:
    """Leave a process that runs the job. This one ends once the job's file names that process."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        named = os.read(reading, 1)
        os._exit(0 if named else 1)
    os.close(reading)
    path = Path(file)
    values = json.loads(path.read_text())
    values["process"] = ProcessName.own().to_json()
    values["started"] = time.time()
    write_json(path, values)
    os.write(writing, b"1")
    os.close(writing)
    values["exit"] = _run(values["argv"])
    values["ended"] = time.time()
    write_json(path, values)


def _run(argv: list[str]) -> int:
    """Run the command. Returns its exit code; of a signal, minus its number."""
    try:
        child = subprocess.Popen(argv)
    except OSError as error:
        print(f"{argv[0]} can't be started: {error.strerror}", file=sys.stderr, flush=True)
        return _NOT_STARTED

    def pass_on(number: int, _frame: FrameType | None) -> None:
        os.kill(child.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    return child.wait()


if __name__ == "__main__":
    main(sys.argv[1])
