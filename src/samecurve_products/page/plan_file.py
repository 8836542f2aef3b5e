"""The values that the list of runs takes from plan.json: devices, steps, strategy.

A plan of another version, or a damaged one, gives what can be read of it.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from samecurve.core.planning.fixed import as_mapping
from samecurve.seam import counted, printable, read_file_bytes

_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class PlanDevice:
    """A device of the plan."""

    kind: str
    name: str
    memory: int | None  # bytes
    index: int


@dataclass(frozen=True)
class PlanFile:
    """The values of a plan, as far as they can be read."""

    engine: str = ""
    strategy: str = ""
    steps: int = 0
    devices: tuple[PlanDevice, ...] = ()

    @property
    def use(self) -> str:
        """The devices as devices.use has them: '0,1' or 'cpu:2'; '': not known."""
        gpus = [str(device.index) for device in self.devices if device.kind != "cpu"]
        if gpus or not self.devices:
            return ",".join(gpus)
        return f"cpu:{len(self.devices)}"

    @property
    def devices_text(self) -> str:
        """'2 x NVIDIA H100', or '2 CPU ranks'."""
        gpus = Counter(device.name for device in self.devices if device.kind != "cpu")
        texts = [f"{count} x {name}" if count > 1 else name for name, count in gpus.items()]
        ranks = sum(device.kind == "cpu" for device in self.devices)
        if ranks:
            texts.append("CPU" if ranks == 1 else counted(ranks, "CPU rank"))
        return ", ".join(texts)


def read_plan_file(path: Path) -> PlanFile:
    """Read plan.json. OSError: it can't be read, or is no plan."""
    try:
        plan = as_mapping(as_mapping(json.loads(read_file_bytes(path, _MOST_BYTES))).get("plan"))
        devices = plan.get("devices")
        return PlanFile(
            engine=_text(plan.get("engine")),
            strategy=_text(plan.get("strategy")),
            steps=_count(plan.get("steps")) or 0,
            devices=tuple(
                PlanDevice(
                    _text(device.get("kind")),
                    _text(device.get("name")),
                    _count(device.get("memory")),
                    _count(device.get("index")) or 0,
                )
                for device in map(as_mapping, devices if isinstance(devices, list) else ())
            ),
        )
    except (ValueError, TypeError, RecursionError):
        return PlanFile()


def _text(value: object) -> str:
    return printable(value)[:200] if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 60 else None
