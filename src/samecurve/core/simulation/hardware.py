"""What devices and links can do, from their makers' data sheets; what NCCL counts on over a link,
from its source. One table for MFU and for `plan --machine`.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samecurve.errors import UserError

_GB, _TERA, _MEBI = 10**9, 1e12, 1 << 20
Medium = Literal["nvlink", "pcie", "network"]


@dataclass(frozen=True)
class LinkSpec:
    """How a device reaches others.

    bandwidth: bytes a second, one way, of each device, as collectives attain them. medium: whose
    latencies hold (core/simulation/step_time.py). source: of the bandwidth.
    """

    name: str
    bandwidth: float
    medium: Medium
    source: str


@dataclass(frozen=True)
class DeviceSpec:
    """memory: bytes.

    peaks: dense FLOP/s by precision, without sparsity. bandwidth: of its memory, bytes a second.
    inside, between: wires within a host and between hosts, as it is usually built. found: a pattern
    in the name that drivers give it. source: of memory, peaks and bandwidth.
    """

    name: str
    memory: int
    peaks: Mapping[str, float]
    bandwidth: float
    inside: LinkSpec
    between: LinkSpec
    source: str
    found: str = ""
    others: tuple[str, ...] = field(default=())


def _nvlink(version: int, links: int, each: float, sm: int) -> LinkSpec:
    return LinkSpec(
        f"NVLink {version}",
        links * each * _GB,
        "nvlink",
        f"{links} links x {each:g} GB/s, which NCCL counts on (src/graph/topo.h, SM{sm}_NVLINK_BW)",
    )


def _pcie(generation: int) -> LinkSpec:
    factor = 2 ** (generation - 3)
    return LinkSpec(
        f"PCIe {generation}.0 x16",
        12.0 * factor * _GB,
        "pcie",
        f"12 GB/s of generation 3, which NCCL counts on (src/graph/topo.h, PCI_BW), x {factor}",
    )


def _net(name: str, gigabits: float, of: str) -> LinkSpec:
    return LinkSpec(
        f"{name} {gigabits:g} Gb/s",
        gigabits / 8 * 0.96 * _GB,
        "network",
        f"{gigabits:g} Gb/s a device ({of}) / 8 x 0.96: NCCL counts on 12 GB/s of 100 Gb/s"
        " (src/graph/topo.h, NET_BW)",
    )


def _xgmi(links: int, each: float, arch: str) -> LinkSpec:
    return LinkSpec(
        "Infinity Fabric",
        links * each * _GB,
        "nvlink",
        f"{links} links x {each:g} GB/s, which RCCL counts on (src/graph/topo.h,"
        f" {arch}_XGMI_WIDTH)",
    )


_NDR, _HDR = (
    _net("InfiniBand NDR", 400, "DGX H100 and B200 data sheets: a 400 Gb/s adapter for each GPU"),
    _net("InfiniBand HDR", 200, "DGX A100 data sheet: a 200 Gb/s adapter for each GPU"),
)
_EDR = _net("InfiniBand EDR", 50, "DGX-1 data sheet: four adapters of 100 Gb/s for eight GPUs")
_ROCE, _ETHERNET = (
    _net("RoCE", 400, "assumed: a 400 Gb/s adapter for each GPU"),
    _net("Ethernet", 25, "assumed"),
)
WIRES = {
    wire.name: wire
    for wire in (
        _nvlink(2, 6, 20.0, 70),
        _nvlink(3, 12, 20.0, 80),
        _nvlink(4, 18, 20.6, 90),
        _nvlink(5, 18, 40.1, 100),
        _pcie(3),
        _pcie(4),
        _pcie(5),
        _xgmi(7, 48.0, "GFX94X"),
        _NDR,
        _HDR,
        _EDR,
        _ROCE,
        _ETHERNET,
    )
}


def _peaks(
    narrow: float, single: float, double: float | None = None, bf16: bool = True
) -> dict[str, float]:
    """TFLOP/s. bf16: False where it has no fast products of it (before Ampere)."""
    given = {"bf16": narrow if bf16 else None, "f16": narrow, "f32": single, "f64": double}
    return {name: value * _TERA for name, value in given.items() if value}


# What drivers call it is searched in this order. Memory: as the driver counts it (nvidia-smi,
# rocm-smi), in MiB; of other figures the source is named.
CARDS = (
    DeviceSpec(
        "B200",
        183359 * _MEBI,
        _peaks(2250, 75, 37),
        7.7e12,
        WIRES["NVLink 5"],
        _NDR,
        "NVIDIA HGX B200 data sheet, without sparsity",
        "G?B200",
    ),
    DeviceSpec(
        "H200",
        143771 * _MEBI,
        _peaks(989, 67, 34),
        4.8e12,
        WIRES["NVLink 4"],
        _NDR,
        "NVIDIA H200 data sheet, without sparsity",
        "G?H200",
        ("H200 SXM",),
    ),
    DeviceSpec(
        "H100 PCIe",
        81559 * _MEBI,
        _peaks(756, 51, 26),
        2.0e12,
        WIRES["PCIe 5.0 x16"],
        _ETHERNET,
        "NVIDIA H100 data sheet (PCIe), without sparsity",
        "H100 PCIe",
    ),
    DeviceSpec(
        "H100",
        81559 * _MEBI,
        _peaks(989, 67, 34),
        3.35e12,
        WIRES["NVLink 4"],
        _NDR,
        "NVIDIA H100 data sheet (SXM), without sparsity",
        "H100",
        ("H100 SXM", "H100 80GB"),
    ),
    DeviceSpec(
        "A100 40GB",
        40960 * _MEBI,
        _peaks(312, 19.5, 9.7),
        1.555e12,
        WIRES["NVLink 3"],
        _HDR,
        "NVIDIA A100 data sheet (SXM, 40 GB)",
        "A100.*40GB",
        ("A100 SXM 40GB",),
    ),
    DeviceSpec(
        "A100",
        81920 * _MEBI,
        _peaks(312, 19.5, 9.7),
        2.039e12,
        WIRES["NVLink 3"],
        _HDR,
        "NVIDIA A100 data sheet (SXM, 80 GB)",
        "A100",
        ("A100 80GB", "A100 SXM"),
    ),
    DeviceSpec(
        "L40S",
        46068 * _MEBI,
        _peaks(362, 91.6),
        864e9,
        WIRES["PCIe 4.0 x16"],
        _ETHERNET,
        "NVIDIA L40S data sheet, without sparsity",
        "L40S",
    ),
    DeviceSpec(
        "RTX 4090",
        24564 * _MEBI,
        _peaks(165, 82.6),
        1.008e12,
        WIRES["PCIe 4.0 x16"],
        _ETHERNET,
        "NVIDIA Ada architecture white paper (f32 accumulation)",
        "RTX 4090",
        ("4090",),
    ),
    DeviceSpec(
        "RTX 3090",
        24576 * _MEBI,
        _peaks(71, 35.6),
        936e9,
        WIRES["PCIe 4.0 x16"],
        _ETHERNET,
        "NVIDIA GA102 architecture white paper (f32 accumulation)",
        "RTX 3090",
        ("3090",),
    ),
    DeviceSpec(
        "V100",
        32510 * _MEBI,
        _peaks(125, 15.7, 7.8, bf16=False),
        900e9,
        WIRES["NVLink 2"],
        _EDR,
        "NVIDIA V100 data sheet (SXM2, 32 GB)",
        "V100",
        ("V100 32GB", "V100 SXM2"),
    ),
    DeviceSpec(
        "MI300X",
        196592 * _MEBI,
        _peaks(1307, 163.4, 81.7),
        5.3e12,
        WIRES["Infinity Fabric"],
        _ROCE,
        "AMD Instinct MI300X data sheet",
        "MI300X",
    ),
    DeviceSpec(
        "MI250X",
        65520 * _MEBI,
        _peaks(191.5, 23.95, 23.95),
        1.6e12,
        _xgmi(4, 36.0, "MI200"),
        _HDR,
        "AMD Instinct MI250X data sheet, halved: a device is one of a card's two dies",
        "MI250X",
    ),
)


def peak(name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device by the name that its driver gives it; None where no data sheet is on
    file.
    """
    for card in CARDS:
        if re.search(rf"(?<![A-Za-z0-9]){card.found}(?![A-Za-z0-9])", name):
            return card.peaks.get(precision)
    return None


def device_spec(name: str, where: str) -> DeviceSpec:
    """By the name a user writes: spaces, dashes and case don't count. UserError: not on file."""
    known = {_plain(word): card for card in CARDS for word in (card.name, *card.others)}
    if _plain(name) in known:
        return known[_plain(name)]
    near = difflib.get_close_matches(_plain(name), known, 1, 0.6)
    hint = f"did you mean {_typed(known[near[0]])}? " if near else ""
    raise UserError(
        f"{name!r} is not a device on file",
        f"{hint}on file: {', '.join(map(_typed, CARDS))}; a JSON file describes any other"
        " (docs/plan.md)",
        where,
    )


def link_spec(name: str, where: str) -> LinkSpec:
    """UserError: not on file."""
    known = {_plain(word): wire for word, wire in WIRES.items()}
    if _plain(name) in known:
        return known[_plain(name)]
    raise UserError(
        f"{name!r} is not a link on file",
        f'on file: {", ".join(WIRES)}; or {{"name": ..., "bandwidth": "50 GB/s"}}',
        where,
    )


def _typed(card: DeviceSpec) -> str:
    return card.name.replace(" ", "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
