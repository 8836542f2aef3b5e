"""Files that a task makes before its first step, each by one rank: latents, embeddings.

The parts are those of one machine's ranks, since a cache may be one machine's own.
"""

import time
from typing import Any

from samecurve.core.events import Event
from samecurve.core.protocols import Heartbeat, Part, Record
from samecurve.units import show_seconds
from samecurve.worker.context import RankContext

_PAUSE = 5.0  # seconds between two lines at least


def prepare_data(
    context: RankContext, task: Any, device: Any, record: Record, heartbeat: Heartbeat
) -> None:
    """Make this rank's part of the files, and wait until those of all ranks are there.

    task: has prepare()
    """
    rank = context.rank
    part = Part(rank.local, max(1, rank.world_size // rank.hosts))
    began = shown = time.monotonic()
    counts: list[tuple[int, float]] = []  # files that are there, and since when
    for done, total in task.prepare(device, part):
        heartbeat(0, "start")
        now = time.monotonic()
        if not counts or done > counts[-1][0]:
            counts.append((done, now))
        if now - shown >= _PAUSE and len(counts) > 2:
            record(_progress(counts, done, total))
            shown = now
    if len(counts) > 1:
        made = counts[-1][0] - counts[0][0]
        text = f"{made:,} encoded in {show_seconds(time.monotonic() - began)}"
        record(Event("prepared", 0, {"text": text, "done": counts[-1][0], "of": counts[-1][0]}))


def _progress(counts: list[tuple[int, float]], done: int, total: int) -> Event:
    """A line about the work that is done and left. The first file says nothing of the pace."""
    (first, since), (last, until) = counts[1], counts[-1]
    left = (until - since) / (last - first) * (total - done)
    text = f"{done:,} of {total:,} encoded  left {show_seconds(left)}"
    return Event("prepared", 0, {"text": text, "done": done, "of": total})
