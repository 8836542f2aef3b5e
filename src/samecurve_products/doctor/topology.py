"""How the GPUs are connected: the paths between them, and what may stand in these paths."""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.probe.gpu_state import GpuState
from samecurve.probe.links import Links, find_links, peer_access
from samecurve.seam import Column, join_words, table_text
from samecurve_products.doctor import Check, passed, warned

_BRIDGE = "0x0604"  # PCI class of a bridge
_CAPABILITIES = 0x100  # where the extended capabilities begin in a device's configuration
_ACS = 0x000D  # the capability of access control
_REDIRECTS = 0x0C  # bits of its control register that send a peer's requests to the processor
_FREE_PATHS = ("NVLink", "XGMI")  # that pass by PCIe


@dataclass(frozen=True)
class Paths:
    """The paths between the GPUs, by pairs of their indices."""

    links: Links
    peers: Mapping[tuple[int, int], bool]  # whether one reads the other's memory


def read_paths(environment: Mapping[str, str], count: int) -> Paths:
    """Ask the driver. count: of GPUs."""
    if count < 2:
        return Paths({}, {})
    return Paths(find_links(), peer_access(environment))


def check_topology(paths: Paths, states: Sequence[GpuState], root: Path = Path("/")) -> list[Check]:
    """The paths between the GPUs, and between them and the processors. None with fewer than two.

    root: below which the system's files lie
    """
    if len(states) < 2:
        return []
    checks = [passed("GPU links", _picture(paths.links, states, root)), *_peers(paths)]
    if any(not path.startswith(_FREE_PATHS) for path in paths.links.values()) or not paths.links:
        checks += [*_translation(states, root), *_access_control(root)]
    return [*checks, *_affinity(states, root)]


def _picture(links: Links, states: Sequence[GpuState], root: Path) -> str:
    """The paths as a table, a row and a column for each GPU."""
    count = len(states)
    columns = [Column(""), *(Column(f"GPU {index}") for index in range(count)), Column("CPU node")]
    rows = []
    for first, state in enumerate(states):
        cells = [links.get((first, second), "?") for second in range(count)]
        cells[first] = "-"
        rows.append([f"GPU {first}", *cells, _node(state, root)])
    return table_text(columns, rows, indent=0)


def _node(state: GpuState, root: Path) -> str:
    """The number of the NUMA node that the GPU sits at; '?': not known."""
    node = _read(root / f"sys/bus/pci/devices/{state.bus}/numa_node") if state.bus else ""
    return node if node and node != "-1" else "?"


def _peers(paths: Paths) -> list[Check]:
    """The pairs that can't read each other's memory."""
    if not paths.peers:
        return []
    apart = [
        f"{first}-{second}"
        for (first, second), direct in sorted(paths.peers.items())
        if first < second and not (direct and paths.peers.get((second, first), direct))
    ]
    if not apart:
        return [passed("GPU peer access", "every GPU reads every other's memory (P2P)")]
    return [
        warned(
            "GPU peer access",
            f"GPUs {join_words(apart)} don't read each other's memory (no P2P): their data goes"
            " through the host, more slowly",
            "a GeForce card has none, and needs nothing done (NCCL_P2P_DISABLE=1 keeps NCCL from"
            " trying); other cards have it if they are"
            " plugged in at the same processor (`nvidia-smi topo -m` shows which)",
        )
    ]


def _translation(states: Sequence[GpuState], root: Path) -> list[Check]:
    """Whether the IOMMU translates what the GPUs send to each other."""
    translated = [
        str(index)
        for index, state in enumerate(states)
        if state.bus
        and _read(root / f"sys/bus/pci/devices/{state.bus}/iommu_group/type").startswith("DMA")
    ]
    if not translated:
        return []
    return [
        warned(
            "IOMMU",
            f"the IOMMU translates the addresses of GPU {join_words(translated)}; copies between"
            " GPUs over PCIe may be slow, hang or lose data",
            "add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, then sudo update-grub, and"
            " restart. In a virtual machine leave the IOMMU as it is",
        )
    ]


def _access_control(root: Path) -> list[Check]:
    """Bridges whose access control (ACS) sends traffic between GPUs through the processor."""
    redirecting = [
        device.name
        for device in sorted(root.glob("sys/bus/pci/devices/*"))
        if _read(device / "class").startswith(_BRIDGE) and _redirects(device / "config")
    ]
    if not redirecting:
        return []
    return [
        warned(
            "PCIe ACS",
            f"{len(redirecting)} PCIe bridges send what GPUs say to each other through the"
            f" processor ({redirecting[0]} is one): slower, and some machines hang",
            "see first whether the test of collectives below passes: then nothing needs to be done."
            " Otherwise switch ACS off in the BIOS, but not in a virtual machine, which needs it",
        )
    ]


def _redirects(config: Path) -> bool:
    """Whether a bridge's configuration redirects requests of peers. Only root reads so far."""
    try:
        content = config.read_bytes()
    except OSError:
        return False
    offset, seen = _CAPABILITIES, set[int]()
    while offset and offset not in seen and offset + 8 <= len(content):
        seen.add(offset)
        (head,) = struct.unpack_from("<I", content, offset)
        if head & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", content, offset + 6)
            return bool(control & _REDIRECTS)
        offset = head >> 20
    return False


def _affinity(states: Sequence[GpuState], root: Path) -> list[Check]:
    """GPUs whose near processors this process may not use."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    far = []
    for index, state in enumerate(states):
        near = _read(root / f"sys/bus/pci/devices/{state.bus}/local_cpulist") if state.bus else ""
        if near and not allowed & _numbers(near):
            far.append(str(index))
    if not far:
        return []
    return [
        warned(
            "CPU affinity",
            f"this process may use no core near GPU {join_words(far)}: what goes to these GPUs"
            " crosses to another processor first",
            "start without taskset or numactl, or with the cores that `lscpu` lists for the GPU's"
            " NUMA node",
        )
    ]


def _numbers(text: str) -> set[int]:
    """'0-2,8' -> {0, 1, 2, 8}."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""
