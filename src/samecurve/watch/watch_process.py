"""The hang watch as a process of its own, for ranks without a launcher beside them: a thread of the
rank can't look while the rank holds the interpreter's lock.

The watch process tells the rank's process of a hang. That process then ends itself. If it does not
answer, the watch process says what it saw, and kills it. The watch process ends when its standard
input does.
"""

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE

import psutil

from samecurve.errors import RunError
from samecurve.processes import OUTLIVES, Call, Process, start_process
from samecurve.watch import HangLimit

_ANSWER = 2.0  # seconds in which a process that can still run answers


@dataclass(frozen=True)
class _Watched:
    """The process that is watched, and its run."""

    journal: str
    logs: str
    process: int  # id of the process that started the watch process
    world_size: int
    limit: HangLimit


@contextmanager
def watched_from_outside(
    journal: Path, logs: Path, *, world_size: int, limit: HangLimit
) -> Iterator[None]:
    """While the block runs, another process watches the ranks of this host.

    journal, logs: of the run. A hang is written there, and this process ends.
    """
    if not limit.floor:
        yield
        return
    watched = _Watched(
        str(journal.absolute()), str(logs.absolute()), os.getpid(), world_size, limit
    )
    # in the terminal's process group: Ctrl-Z stops both
    call = Call(__name__, (json.dumps(asdict(watched)),), ended_by=OUTLIVES)
    process = start_process(call, stdin=PIPE, stdout=PIPE)
    thread = threading.Thread(
        target=_end_on_hang, args=(process, watched), name="hangs", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        process.wait()
        thread.join()


def _end_on_hang(process: Process, watched: _Watched) -> None:
    """Wait for the watch process to tell of a hang; then end this process."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    if line:
        process.stdin.close()  # the answer
        error = RunError(**json.loads(line))
        _say(watched, error)
        os._exit(error.exit_code)


def main(argument: str) -> None:
    """Watch the process that started this one."""
    from samecurve.watch import live_ranks
    from samecurve.watch.hang_watch import OFTEN, HangWatch, state_of

    values = json.loads(argument)
    watched = _Watched(**{**values, "limit": HangLimit(**values["limit"])})
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


def _ended(watched: _Watched, seconds: float) -> bool:
    """Whether the watch is over, because the process closed the input or ended."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != watched.process


def _kill(watched: _Watched, error: RunError) -> None:
    """End the process, which holds the interpreter's lock and can't do so itself."""
    _say(watched, error)
    with suppress(psutil.Error):
        for child in psutil.Process(watched.process).children(recursive=True):
            if child.pid != os.getpid():
                with suppress(psutil.Error):
                    child.kill()
    with suppress(OSError):
        os.kill(watched.process, signal.SIGKILL)


def _say(watched: _Watched, error: RunError) -> None:
    from samecurve.observe.failed_event import record_failure

    record_failure(Path(watched.journal), Path(watched.logs), error)
    with suppress(OSError):
        os.write(2, f"error: {error}\n".encode())
