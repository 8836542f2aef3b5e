"""The devices of this machine, and how busy they are now; the same of a run, by its journal."""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, TypedDict

from samecurve.probe import cpu_cores, cpu_name, host_memory
from samecurve.probe.links import Links, find_links
from samecurve.probe.sensors import Sensors
from samecurve.seam import Machine, UserError, probe
from samecurve_products.init.detected import detected
from samecurve_products.page.plan_file import PlanFile

_MOST = 64  # devices of a run
_FRESH = 1.0  # seconds in which a reading counts


class DeviceNow(TypedDict):
    """A device, and how busy it is. A value that can't be read is None."""

    index: int
    kind: str
    name: str
    memory: int | None  # bytes
    used: float | None  # bytes
    utilisation: float | None  # 0 to 1
    power_watts: float | None
    celsius: float | None


class Devices:
    """Reads the devices: which there are once, what they do at most once a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sensors: Sensors | None = None
        self._now: list[DeviceNow] = []
        self._fresh_until = 0.0
        self._links: Links | None = None
        self.error = ""  # why the devices could not be found
        try:
            self.machine = probe()
        except UserError as error:  # a variable names a GPU that isn't there
            self.error = f"{error.cause}; {error.remedy}"
            self.machine = Machine(
                devices=(), links=(), host_bytes=host_memory(), cores=cpu_cores(), cpu=cpu_name()
            )

    @property
    def detected(self) -> str:
        return f"No GPU found: {self.error}" if self.error else detected(self.machine)

    def now(self) -> list[DeviceNow]:
        with self._lock:
            if time.monotonic() > self._fresh_until:
                self._now = self._read()
                self._fresh_until = time.monotonic() + _FRESH
            return self._now

    def links(self) -> Links:
        """The paths between each two GPUs, which are asked for once."""
        with self._lock:
            if self._links is None:
                self._links = find_links() if len(self.machine.devices) > 1 else {}
            return self._links

    def _read(self) -> list[DeviceNow]:
        devices = self.machine.devices
        if not devices:
            return []
        owners = range(len(devices))
        if self._sensors is None:
            self._sensors = Sensors(devices, list(owners), threads=1)
        values = self._sensors.read(dict.fromkeys(owners, os.getpid()))
        return [
            {
                "index": device.index,
                "kind": device.kind,
                "name": device.name,
                "memory": device.memory,
                "used": _value(values, "memory_bytes", place),
                "utilisation": _value(values, "utilisation", place),
                "power_watts": _value(values, "power_watts", place),
                "celsius": _value(values, "celsius", place),
            }
            for place, device in enumerate(devices)
        ]


def device_readings(plan: PlanFile, values: Mapping[str, object]) -> list[dict[str, Any]]:
    """The activity of each device of the plan, by a line of sensors; []: the line has none."""
    names = ("utilisation", "memory_bytes", "power_watts", "celsius")
    if not any(isinstance(values.get(f"{name}_by_device"), list) for name in names):
        return []
    return [
        {
            "name": f"{device.name} {place}" if len(plan.devices) > 1 else device.name,
            "memory_total": device.memory if device.kind != "cpu" else None,
            **{name: _value(values, name, place) for name in names},
        }
        for place, device in enumerate(plan.devices[:_MOST])
    ]


def _value(values: Mapping[str, object], name: str, device: int) -> float | None:
    """A device's value in a line of sensors; None: it can't be read."""
    by_device = values.get(f"{name}_by_device")
    value = by_device[device] if isinstance(by_device, list) and device < len(by_device) else None
    return value if isinstance(value, int | float) else None
