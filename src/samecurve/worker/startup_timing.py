"""What a start took, and the starts before it that the same command made, for the journal."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from samecurve.core.events import Event
from samecurve.run.directory.attempt import Earlier


class StartupClock:
    """Seconds of a start's parts."""

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
    """record(), for a start that follows others of the same command: with a `recovered` line after
    the first step, and the whole command's goodput at its end.

    resumed_at: the step that this start goes on from.
    """
    recovery: list[float] = []  # its seconds, once it is over

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
    """The totals of all starts: wall seconds, steps, the share of those seconds in steps that
    count, and how long each recovery took.
    """
    wall = event.time - earlier.began
    useful = earlier.useful + event.values["goodput"] * event.values["seconds"]
    return {
        "seconds": wall,
        "steps": earlier.steps + event.values["steps"],
        "goodput": useful / wall,
        "recoveries": [*earlier.recoveries, *recovery],
    }
