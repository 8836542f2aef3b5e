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
    begun, done = None, 0
    for done, total in task.prepare(device, part):
        heartbeat(0, "start")
        begun = done if begun is None else begun
        now = time.monotonic()
        if now - shown < _PAUSE or done == begun:
            continue
        left = (now - began) / (done - begun) * (total - done)
        text = f"{done:,} of {total:,} encoded  left {show_seconds(left)}"
        record(Event("prepared", 0, {"text": text, "done": done, "of": total}))
        shown = now
    if begun is not None and done > begun:
        text = f"{done - begun:,} encoded in {show_seconds(time.monotonic() - began)}"
        record(Event("prepared", 0, {"text": text, "done": done, "of": done}))
