"""The seconds of a start, and of the command's earlier starts, for the journal."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from samecurve.core.events import Event
from samecurve.run.directory.attempt import Earlier


class StartupClock:
    """Times the parts of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"{name}_seconds"] = round(time.perf_counter() - began, 3)


def machine_load() -> dict[str, Any]:
    """The machine's load average, and its cores."""
    return {"load": round(os.getloadavg()[0], 2), "cores": os.cpu_count() or 1}


def after_others(
    record: Callable[[Event], None], earlier: Earlier, *, resumed_at: int
) -> Callable[[Event], None]:
    """Wrap record(), for a start that follows others of the same command.

    A `recovered` line follows the first step. The last line has the whole command's goodput.

    resumed_at: the step that this start goes on from.
    """
    recovery: list[float] = []  # the seconds of the recovery, once it is over

    def recorded(event: Event) -> None:
        if event.kind in {"finished", "stopped"}:
            totals = _totals(event, earlier, recovery)
            event = replace(event, values={**event.values, **totals})
        record(event)
        if event.kind == "step" and not recovery:
            recovery.append(round(event.time - earlier.failed, 3))
            record(Event("recovered", event.step, {"seconds": recovery[0], "from": resumed_at}))

    return recorded


def _totals(event: Event, earlier: Earlier, recovery: list[float]) -> dict[str, Any]:
    """The totals of all starts: wall seconds, steps, goodput, and the seconds of each recovery.

    Goodput is the share of the wall seconds in steps that still count.
    """
    wall = event.time - earlier.began
    useful = earlier.useful + event.values["goodput"] * event.values["seconds"]
    return {
        "seconds": wall,
        "steps": earlier.steps + event.values["steps"],
        "goodput": useful / wall,
        "recoveries": [*earlier.recoveries, *recovery],
    }
