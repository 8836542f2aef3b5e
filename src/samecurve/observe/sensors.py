"""What the devices do beside the losses: `sensors` events every few seconds, one console line for
all of them, and a word when one does nothing.

Read in a thread of the launcher. A reading that fails leaves its values out; nothing here can slow
a step or end a run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samecurve.core.events import Event
from samecurve.observe.heartbeat import read_heartbeat
from samecurve.observe.journal import append_event
from samecurve.units import show_bytes

IDLE_SECONDS = 60.0  # seconds
_IDLE, _BUSY = 0.05, 0.15  # utilisation below which a device does nothing; from which one works
_LEAVE = 2.0  # seconds for a reading under way: a driver may hang

Values = Sequence[float | None]


class IdleDevices:
    """Devices that do nothing while another works, for `patience` seconds without a break: each is
    found once, and again only after it has worked.
    """

    def __init__(self, patience: float = IDLE_SECONDS) -> None:
        self._patience = patience
        self._since: dict[int, float] = {}
        self._found: set[int] = set()

    def add(self, at: float, utilisation: Values) -> list[int]:
        """at: seconds.

        utilisation: of each device; None is unknown, neither idle nor busy. Returns those newly
        found.
        """
        another = any(value is not None and value >= _BUSY for value in utilisation)
        idle = {
            device
            for device, value in enumerate(utilisation)
            if value is not None and value < _IDLE
        }
        self._found -= {
            device
            for device, value in enumerate(utilisation)
            if value is not None and value >= _IDLE
        }
        self._since = {device: self._since.get(device, at) for device in idle} if another else {}
        new = [
            device
            for device, since in self._since.items()
            if at - since >= self._patience and device not in self._found
        ]
        self._found.update(new)
        return new


@contextmanager
def record_sensors(
    read: Callable[[], dict[str, Any]],
    say: Callable[[Sequence[int]], str],
    pulse: Path,
    journal: Path,
    every: float,
    patience: float = IDLE_SECONDS,
) -> Iterator[None]:
    """Append what read() gives every so many seconds, while the first rank's pulse says that it
    trains, until the block ends. say: devices that do nothing -> a warning.
    """
    stop = threading.Event()

    def work() -> None:
        idle = IdleDevices(patience)
        while not stop.wait(every):
            values = read()
            step, phase = read_heartbeat(pulse) or (0, "start")
            if phase in {"start", "end"} or stop.is_set():
                continue
            with suppress(
                OSError
            ):  # a full disk: the journal's own writer ends the run and says so
                append_event(journal, Event("sensors", step, values))
                if found := idle.add(
                    time.monotonic(),
                    values.get("utilisation_by_device", ()) if phase == "step" else (),
                ):
                    append_event(journal, Event("warned", step, {"text": say(found)}))

    thread = threading.Thread(target=work, name="sensors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LEAVE)


def load_line(event: Event) -> str:
    """One line for all devices: low, mean and high where they differ."""
    values = event.values
    parts = {
        "use": _spread(values.get("utilisation_by_device"), lambda value: f"{value:.0%}"),
        "mem": _spread(_memory(values), show_bytes),
        "power": _spread(values.get("power_watts_by_device"), lambda value: f"{value:.0f} W"),
        "temp": _spread(values.get("celsius_by_device"), lambda value: f"{value:.0f} C"),
        "cores": _spread(values.get("cores_by_process"), lambda value: f"{value:.1f}"),
        "host": _spread([values.get("host_utilisation")], lambda value: f"{value:.0%}"),
    }
    shown = [f"{name} {text}" for name, text in parts.items() if text]
    return "  ".join([f"load   step {event.step}", *shown])


def _memory(values: dict[str, Any]) -> Values | None:
    return values.get("memory_bytes_by_device") or values.get("memory_bytes_by_process")


def _spread(values: Values | None, show: Callable[[float], str]) -> str:
    """'97%', or '0% .. 24% .. 97%' and of how many; '' where nothing is known."""
    known = [value for value in values or () if value is not None]
    if not known:
        return ""
    low, mean, high = (show(value) for value in (min(known), sum(known) / len(known), max(known)))
    return high if low == mean == high else f"{low} .. {mean} .. {high}"
