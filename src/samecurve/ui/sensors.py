"""The activity of a run's devices, from the last line of sensors in its journal."""

from collections.abc import Mapping
from typing import Any

from samecurve.ui.plan_file import PlanFile

_MOST = 64  # devices


def device_readings(plan: PlanFile, values: Mapping[str, object]) -> list[dict[str, Any]]:
    """A reading for each device of the plan; []: the journal has none. None: can't be read.

    values: of a `sensors` line
    """
    readings = {
        name: by_device
        for name in ("utilisation", "memory_bytes", "power_watts", "celsius")
        if isinstance(by_device := values.get(f"{name}_by_device"), list)
    }
    if not readings:
        return []

    def value(name: str, device: int) -> float | None:
        by_device = readings.get(name, [])
        value = by_device[device] if device < len(by_device) else None
        return value if isinstance(value, int | float) else None

    return [
        {
            "name": f"{device.name} {place}" if len(plan.devices) > 1 else device.name,
            "utilisation": value("utilisation", place),
            "memory_bytes": value("memory_bytes", place),
            "memory_total": device.memory if device.kind != "cpu" else None,
            "power_watts": value("power_watts", place),
            "celsius": value("celsius", place),
        }
        for place, device in enumerate(plan.devices[:_MOST])
    ]
