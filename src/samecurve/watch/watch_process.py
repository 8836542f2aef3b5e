"""The process that watches ranks without a launcher beside them: see the package's page."""

import json
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from samecurve.errors import RunError
from samecurve.watch import HangLimit, Watched, live_ranks, say
from samecurve.watch.hang_watch import OFTEN, HangWatch, state_of

_ANSWER = 2.0  # seconds in which a process that can still run answers


def main(argument: str) -> None:
    """Watch the process that started this one."""
    values = json.loads(argument)
    watched = Watched(**{**values, "limit": HangLimit(**values["limit"])})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the end of its input ends it
        signal.signal(number, signal.SIG_IGN)
    logs, foreign = Path(watched.logs), set[str]()
    hangs = HangWatch(
        logs,
        lambda: live_ranks(logs, foreign),
        world_size=watched.world_size,
        limit=watched.limit,
        spared=watched.process,
    )
    while not _ended(watched, OFTEN):
        if state_of(watched.process) in {
            "T",
            "t",
        }:  # a process that was stopped by hand does not hang
            continue
        error = hangs.look()
        if error is None:
            continue
        text = {name: getattr(error, name) for name in ("cause", "remedy", "again", "log")}
        with suppress(BrokenPipeError):
            print(json.dumps(text), flush=True)
        if not _ended(watched, _ANSWER):
            _kill(watched, error)
        return


def _ended(watched: Watched, seconds: float) -> bool:
    """Whether the watch is over, because the process closed the input or ended."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != watched.process


def _kill(watched: Watched, error: RunError) -> None:
    """End the process, which holds the interpreter's lock and can't do so itself."""
    say(watched, error)
    with suppress(psutil.Error):
        for child in psutil.Process(watched.process).children(recursive=True):
            if child.pid != os.getpid():
                with suppress(psutil.Error):
                    child.kill()
    with suppress(OSError):
        os.kill(watched.process, signal.SIGKILL)
