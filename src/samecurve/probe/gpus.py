"""The GPUs of this machine, from NVIDIA (nvidia.py) or AMD.

AMD's are read from the files of the kernel's driver (KFD) in sysfs: no ROCm library is loaded, no
context made. Indices are those a program sees under HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from samecurve.core.planning.machine import Device
from samecurve.probe import nvidia
from samecurve.probe.nvidia import choose_visible

NVIDIA, AMD = "NVIDIA", "AMD"
TOPOLOGY = Path("/sys/class/kfd/kfd/topology")
_HIP = "HIP_VISIBLE_DEVICES"
_RUNTIME = "ROCR_VISIBLE_DEVICES"  # applied first, by the layer below HIP
# heap types of a memory bank: the card's own memory, visible to the host or not
_FRAME_BUFFERS = {1, 2}


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use."""

    vendor: str  # '' without any
    devices: tuple[Device, ...]
    variable: str  # the environment variable that chooses among them


def find_gpus(environment: Mapping[str, str]) -> Gpus:
    """NVIDIA's GPUs, else AMD's, else none.

    UserError: an environment variable names a GPU that isn't there.
    """
    if devices := nvidia.devices(environment):
        return Gpus(NVIDIA, devices, nvidia.VISIBLE)
    if devices := amd_devices(environment):
        return Gpus(AMD, devices, _hip_variable(environment))
    return Gpus("", (), "")


class _Gpu(NamedTuple):
    name: str
    memory_bytes: int
    unique_id: str


def amd_devices(environment: Mapping[str, str], topology: Path | None = None) -> tuple[Device, ...]:
    """The GPUs that the variables leave visible, in their order. () without the driver.

    topology: what the driver lays out; TOPOLOGY if not given

    UserError: a variable names a GPU that isn't there.
    """
    gpus = _read_gpus(topology or TOPOLOGY)
    for name in (_RUNTIME, _hip_variable(environment)):
        gpus = choose_visible(name, environment, gpus, _match, hide_all={"-1"})
    return tuple(
        Device(kind="cuda", index=index, name=gpu.name, memory=gpu.memory_bytes)
        for index, gpu in enumerate(gpus)
    )


def _hip_variable(environment: Mapping[str, str]) -> str:
    """The variable that HIP reads: CUDA's where only that is set."""
    if not environment.get(_HIP) and "CUDA_VISIBLE_DEVICES" in environment:
        return "CUDA_VISIBLE_DEVICES"
    return _HIP


def _read_gpus(topology: Path) -> list[_Gpu]:
    """The driver's nodes that have compute units."""
    gpus = []
    nodes = [path for path in topology.glob("nodes/*") if path.name.isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name)):
        values = _read_properties(node / "properties")
        if values.get("simd_count", 0) > 0:
            banks = [_read_properties(bank) for bank in node.glob("mem_banks/*/properties")]
            memory = sum(
                bank.get("size_in_bytes", 0)
                for bank in banks
                if bank.get("heap_type") in _FRAME_BUFFERS
            )
            unique_id = f"GPU-{values.get('unique_id', 0):016x}"
            name = f"AMD {_read_name(values).removeprefix('AMD ')}"
            gpus.append(_Gpu(name, memory, unique_id))
    return gpus


def _read_name(values: Mapping[str, int]) -> str:
    """The card's name where its firmware has one, else its architecture: 90402 is gfx942."""
    version = values.get("gfx_target_version", 0)
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    card = Path(f"/sys/class/drm/renderD{values.get('drm_render_minor', 0)}/device")
    try:
        name = (card / "product_name").read_text().strip()
    except OSError:
        return architecture
    if not name:
        return architecture
    return f"{name} ({architecture})"


def _read_properties(path: Path) -> dict[str, int]:
    """The names and numbers in the lines of a file.

    {} where a container hides the device: its file can't be read, or is empty.
    """
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _match(entry: str, gpus: list[_Gpu]) -> list[_Gpu]:
    """entry: an index, or a GPU's id."""
    return [
        gpu
        for index, gpu in enumerate(gpus)
        if entry == str(index) or entry.lower() == gpu.unique_id.lower()
    ]
