"""Files that a task makes before its first step, each by one rank: latents, drawn images.

The parts are those of one machine's ranks, since a cache may be one machine's own. All ranks look
for a request to stop between two files, and agree whether the run begins.
"""

import time
from contextlib import closing, suppress
from itertools import chain, islice
from typing import Any

from samecurve.core.events import Event
from samecurve.core.protocols import Engine, Heartbeat, Part, Record
from samecurve.run.directory.attempt import ControlFile, Requests, ask
from samecurve.units import counted, show_seconds
from samecurve.worker.context import RankContext

_PAUSE = 5.0  # seconds between two lines at least


def prepare_data(
    context: RankContext,
    task: Any,
    engine: Engine,
    requests: Requests,
    *,
    record: Record,
    heartbeat: Heartbeat,
    step: int,
) -> bool:
    """Make this rank's part of the files, and wait until those of all ranks are there.

    task: has prepare()
    step: that the run goes on from

    Returns whether all files are there. False: somebody has asked for a stop, which is recorded.
    """
    rank = context.rank
    part = Part(rank.local, max(1, rank.world_size // rank.hosts))
    stop = _StopRequests(context, requests)
    is_stopping = False
    began = shown = time.monotonic()
    counts: list[tuple[int, float]] = []  # files that are there, and since when
    with closing(task.prepare(engine.device, part)) as progress:
        # each rank looks what is there before any of them makes a file: so the count is right
        first = list(islice(progress, 1))
        engine.preflight()
        for done, total in chain(first, progress):
            heartbeat(0, "start")
            is_stopping = stop.is_asked()
            if is_stopping:
                break
            now = time.monotonic()
            if not counts or done > counts[-1][0]:
                counts.append((done, now))
            if now - shown >= _PAUSE and len(counts) > 2:
                record(_progress(counts, done, total, task.prepared_files))
                shown = now
    if engine.preflight(float(is_stopping)):
        if context.is_first:
            record(Event("stopped", step, {"text": _stop_line(task, engine.device, part)}))
        return False
    if len(counts) > 1:
        count = counts[-1][0] - counts[0][0]
        files = f"{counted(count, 'file')}{task.prepared_files}"
        text = f"{files} made in {show_seconds(time.monotonic() - began)}"
        record(Event("prepared", 0, {"text": text, "done": counts[-1][0], "of": counts[-1][0]}))
    return True


class _StopRequests:
    """Requests to stop, as each rank sees them. They stay for the first step."""

    def __init__(self, context: RankContext, requests: Requests) -> None:
        self._context, self._own = context, requests
        self._of_all = requests  # of the run's control file
        if not context.is_first:
            self._of_all = Requests(ControlFile(context.run, context.attempt.name))

    def is_asked(self) -> bool:
        """Whether the run is asked to stop. A signal to this rank is passed on to the others."""
        if self._own.has_stop_signal:
            with suppress(OSError):  # a full disk: then each rank gets the signal
                ask(self._context.run, self._context.attempt.name, "stop")
            return True
        return self._of_all.is_stop_asked()


def _stop_line(task: Any, device: Any, part: Part) -> str:
    """What is there when all ranks have stopped."""
    with closing(task.prepare(device, part)) as progress:
        done, total = next(progress, (0, 0))  # the first line is told before anything is made
    where = f"while files were made, {done:,} of {total:,} done" if total else "when all were made"
    return f"{where}; the same command goes on"


def _progress(counts: list[tuple[int, float]], done: int, total: int, files: str) -> Event:
    """A line about the work that is done and left. The first file says nothing of the pace.

    files: what the files hold, in words
    """
    (first, since), (last, until) = counts[1], counts[-1]
    left = (until - since) / (last - first) * (total - done)
    text = f"{done:,} of {total:,} files{files} made  left {show_seconds(left)}"
    return Event("prepared", 0, {"text": text, "done": done, "of": total})
