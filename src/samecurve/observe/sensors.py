"""Sensors: readings of the devices during a run.

A thread of the launcher writes a `sensors` event every few seconds, and a warning if a device is
idle or has a fault. The console shows one line for all devices. A failed reading has no values; it
neither slows a step nor ends the run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samecurve.core.events import Event
from samecurve.observe import append_event, read_beat
from samecurve.units import show_bytes

IDLE_SECONDS = 60.0  # seconds
_IDLE = 0.05  # utilisation below which a device is idle
_BUSY = 0.15  # utilisation from which a device works
_LAST_READING = 2.0  # seconds to wait for a reading: a driver may hang

Values = Sequence[float | None]


class IdleDevices:
    """Find devices that are idle for `patience` seconds while another device works.

    Each device is reported once, and again only after it has worked.
    """

    def __init__(self, patience: float = IDLE_SECONDS) -> None:
        self._patience = patience
        self._idle_since: dict[int, float] = {}
        self._reported: set[int] = set()

    def add(self, at: float, utilisation: Values) -> list[int]:
        """The devices to report now.

        at: seconds
        utilisation: of each device; None: unknown, neither idle nor busy
        """
        known = {device: value for device, value in enumerate(utilisation) if value is not None}
        idle = {device for device, value in known.items() if value < _IDLE}
        self._reported -= known.keys() - idle
        if any(value >= _BUSY for value in known.values()):
            self._idle_since = {device: self._idle_since.get(device, at) for device in idle}
        else:
            self._idle_since = {}
        newly = [
            device
            for device, since in self._idle_since.items()
            if at - since >= self._patience and device not in self._reported
        ]
        self._reported.update(newly)
        return newly


@contextmanager
def record_sensors(
    read: Callable[[], dict[str, Any]],
    warning: Callable[[Sequence[int]], str],
    new_faults: Callable[[], Sequence[str]],
    *,
    heartbeat: Path,
    journal: Path,
    interval: float,
    patience: float = IDLE_SECONDS,
) -> Iterator[None]:
    """Append readings to the journal until the block ends.

    read: returns the values of a `sensors` event
    warning: makes the text of a warning about idle devices
    new_faults: texts on what has gone wrong with devices since the last reading
    heartbeat: the first rank's; devices are judged only while this rank trains
    interval: seconds between readings
    """
    stop = threading.Event()

    def work() -> None:
        idle_devices = IdleDevices(patience)
        while not stop.wait(interval):
            values = read()
            beat = read_beat(heartbeat)
            if beat is None or beat.activity in {"start", "end"} or stop.is_set():
                continue
            utilisation: Values = ()
            if beat.activity == "step":  # in other activities a device may be idle
                utilisation = values.get("utilisation_by_device", ())
            texts = list(new_faults())
            if idle := idle_devices.add(time.monotonic(), utilisation):
                texts.append(warning(idle))
            with suppress(OSError):  # a full disk: the journal's own writer ends the run
                append_event(journal, Event("sensors", beat.step, values))
                for text in texts:
                    append_event(journal, Event("warned", beat.step, {"text": text}))

    thread = threading.Thread(target=work, name="sensors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_LAST_READING)


def load_line(event: Event) -> str:
    """A line for all devices: lowest, mean and highest value if they differ."""
    values = event.values
    memory_bytes = values.get("memory_bytes_by_device") or values.get("memory_bytes_by_process")
    parts = {
        "use": _spread(values.get("utilisation_by_device"), lambda value: f"{value:.0%}"),
        "mem": _spread(memory_bytes, show_bytes),
        "power": _spread(values.get("power_watts_by_device"), lambda value: f"{value:.0f} W"),
        "temp": _spread(values.get("celsius_by_device"), lambda value: f"{value:.0f} C"),
        "cores": _spread(values.get("cores_by_process"), lambda value: f"{value:.1f}"),
        "host": _spread([values.get("host_utilisation")], lambda value: f"{value:.0%}"),
    }
    shown = [f"{name} {text}" for name, text in parts.items() if text]
    return "  ".join([f"load   step {event.step}", *shown])


def _spread(values: Values | None, show: Callable[[float], str]) -> str:
    """The text '97%', or '0% .. 24% .. 97%' and the number of devices; '': nothing is known."""
    known = [value for value in values or () if value is not None]
    if not known:
        return ""
    low, mean, high = (show(value) for value in (min(known), sum(known) / len(known), max(known)))
    if low == mean == high:
        return high
    return f"{low} .. {mean} .. {high}"
