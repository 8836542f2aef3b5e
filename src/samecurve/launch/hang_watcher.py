"""The hang watch as a process of its own, for ranks that have no launcher beside them: a thread of
theirs can't look while one of them holds the interpreter's lock.

It tells this process of a hang, which then ends itself; if that does not answer either, the watcher
says what was seen, and kills it. It ends when its standard input does.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from samecurve.errors import RunError
from samecurve.launch.hang_watch import OFTEN, HangLimit, HangWatch, state_of
from samecurve.run.directory.rank_logs import live_ranks

_ANSWER = 2.0  # seconds in which a process that can still run answers


@dataclass(frozen=True)
class _Watched:
    """What the watcher is started for."""

    run: str  # the directory
    process: int  # that started it
    world_size: int
    limit: HangLimit


@contextmanager
def watcher(
    run: Path, *, world_size: int, limit: HangLimit, on_hang: Callable[[RunError], None]
) -> Iterator[None]:
    """While the block runs, ranks of this host are watched from outside.

    run: the run's directory.
    on_hang: called with a hang, in a thread; ends the process.
    """
    if not limit.floor:
        yield
        return
    watched = _Watched(str(run.absolute()), os.getpid(), world_size, limit)
    # of the terminal's own group: Ctrl-Z stops both
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, json.dumps(asdict(watched))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    thread = threading.Thread(target=_pass_on, args=(process, on_hang), name="hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        process.wait()
        thread.join()


def _pass_on(process: "subprocess.Popen[bytes]", on_hang: Callable[[RunError], None]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    if line:
        process.stdin.close()  # the answer
        on_hang(RunError(**json.loads(line)))


def main(argument: str) -> None:
    values = json.loads(argument)
    watched = _Watched(**{**values, "limit": HangLimit(**values["limit"])})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # its input says when to end
        signal.signal(number, signal.SIG_IGN)
    logs = Path(watched.run) / "logs"
    hangs = HangWatch(
        logs,
        lambda: live_ranks(logs),
        world_size=watched.world_size,
        limit=watched.limit,
        spared=watched.process,
    )
    while not _ended(watched, OFTEN):
        if state_of(watched.process) in {"T", "t"}:  # what is stopped by hand does not hang
            continue
        error = hangs.look()
        if error is None:
            continue
        with suppress(BrokenPipeError):
            print(json.dumps(_as_json(error)), flush=True)
        if not _ended(watched, _ANSWER):
            _end(watched, error)
        return


def _ended(watched: _Watched, seconds: float) -> bool:
    """Whether nobody is to be watched any more, waited for so long."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) or os.getppid() != watched.process


def _as_json(error: RunError) -> dict[str, object]:
    return {
        "cause": error.cause,
        "remedy": error.remedy,
        "again": error.again,
        "log": error.log,
    }


def _end(watched: _Watched, error: RunError) -> None:
    """In place of the process, which holds the interpreter's lock and hears nothing."""
    from samecurve.run.directory.run_directory import Run
    from samecurve.worker.preflight import record_failure

    record_failure(Run(Path(watched.run)), error)
    with suppress(OSError):
        os.write(2, f"error: {error}\n".encode())
    with suppress(psutil.Error):
        for child in psutil.Process(watched.process).children(recursive=True):
            if child.pid != os.getpid():
                with suppress(psutil.Error):
                    child.kill()
    with suppress(OSError):
        os.kill(watched.process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
