"""Load, memory, power and temperature of AMD GPUs during a run, from the kernel's files.

The driver writes them for every card, also where neither amdsmi nor rocm-smi is installed. A file
that is missing or has no number gives None: power of a card that runs as part of another one, or
what a container hides.

Source: "GPU Power/Thermal Controls and Monitoring" of the kernel's amdgpu documentation.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from samecurve.probe import amd

PCI = Path("/sys/bus/pci/devices")
_POWER = ("power1_average", "power1_input")  # microwatts; newer cards have the second one


class CardLoad(NamedTuple):
    """A reading of one card."""

    utilisation: float | None  # share of the time at work
    memory_bytes: float | None
    power_watts: float | None
    celsius: float | None


def find_cards(environment: Mapping[str, str], topology: Path) -> list[Path]:
    """The directory of each visible GPU, in the order of the devices.

    topology, UserError: as amd.devices().
    """
    return [PCI / (gpu.bus or "unknown") for gpu in amd.visible(environment, topology)]


def read_card(card: Path) -> CardLoad:
    """What the kernel tells of a card now. card: its directory"""
    monitor = next(card.glob("hwmon/hwmon*"), card / "hwmon")
    watts = next((value for name in _POWER if (value := _number(monitor / name))), None)
    return CardLoad(
        utilisation=_scaled(_number(card / "gpu_busy_percent"), 100),
        memory_bytes=_number(card / "mem_info_vram_used"),
        power_watts=_scaled(watts, 1_000_000),
        celsius=_scaled(_number(monitor / "temp1_input"), 1_000),
    )


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _scaled(value: int | None, divisor: int) -> float | None:
    return None if value is None else value / divisor
