"""Data sheets of devices and links: memory, peaks and bandwidths, each with its source.

MFU and `plan --machine` read the same table. Bandwidths of links are those in NCCL's source.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from samecurve.errors import UserError

_GB, _TERA, _MEBI = 10**9, 1e12, 1 << 20
Medium = Literal["nvlink", "pcie", "network"]


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A link between devices."""

    name: str
    bandwidth: float  # bytes a second, one way, of each device, as collectives attain them
    medium: Medium  # whose latencies hold (simulation/collectives.py)
    source: str  # of the bandwidth


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """The data sheet of one device."""

    name: str
    memory: int  # bytes
    peaks: Mapping[str, float]  # dense FLOP/s by precision, without sparsity
    bandwidth: float  # of its memory, bytes a second
    inside: LinkSpec  # within a host, as it is usually built
    between: LinkSpec  # between hosts
    source: str  # of memory, peaks and bandwidth
    driver_pattern: str = ""  # in the name that drivers give it
    aliases: tuple[str, ...] = field(default=())  # other names that a user may write


def _nvlink(version: int, links: int, each: float, sm: int) -> LinkSpec:
    return LinkSpec(
        name=f"NVLink {version}",
        bandwidth=links * each * _GB,
        medium="nvlink",
        source=(
            f"{links} links x {each:g} GB/s, which NCCL counts on (src/graph/topo.h,"
            f" SM{sm}_NVLINK_BW)"
        ),
    )


def _pcie(generation: int) -> LinkSpec:
    factor = 2 ** (generation - 3)
    return LinkSpec(
        name=f"PCIe {generation}.0 x16",
        bandwidth=12.0 * factor * _GB,
        medium="pcie",
        source=(
            f"12 GB/s of generation 3, which NCCL counts on (src/graph/topo.h, PCI_BW), x {factor}"
        ),
    )


def _net(name: str, gigabits: float, of: str) -> LinkSpec:
    return LinkSpec(
        name=f"{name} {gigabits:g} Gb/s",
        bandwidth=gigabits / 8 * 0.96 * _GB,
        medium="network",
        source=f"{gigabits:g} Gb/s a device ({of}) / 8 x 0.96: NCCL counts on 12 GB/s of 100 Gb/s"
        " (src/graph/topo.h, NET_BW)",
    )


def _xgmi(links: int, each: float, arch: str) -> LinkSpec:
    return LinkSpec(
        name="Infinity Fabric",
        bandwidth=links * each * _GB,
        medium="nvlink",
        source=f"{links} links x {each:g} GB/s, which RCCL counts on (src/graph/topo.h,"
        f" {arch}_XGMI_WIDTH)",
    )


_NDR = _net("InfiniBand NDR", 400, "DGX H100 and B200 data sheets: a 400 Gb/s adapter for each GPU")
_HDR = _net("InfiniBand HDR", 200, "DGX A100 data sheet: a 200 Gb/s adapter for each GPU")
_EDR = _net("InfiniBand EDR", 50, "DGX-1 data sheet: four adapters of 100 Gb/s for eight GPUs")
_ROCE = _net("RoCE", 400, "assumed: a 400 Gb/s adapter for each GPU")
_ETHERNET = _net("Ethernet", 25, "assumed")
LINKS = {
    link.name: link
    for link in (
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
    narrow: float, single: float, double: float | None = None, *, bf16: bool = True
) -> dict[str, float]:
    """FLOP/s by precision from TFLOP/s, of matrix products: by tensor cores, where those have the
    format (f64 since A100: twice the plain units' peak).

    bf16: False: no fast products of it (before Ampere).
    """
    teraflops = {"bf16": narrow if bf16 else None, "f16": narrow, "f32": single, "f64": double}
    return {name: value * _TERA for name, value in teraflops.items() if value}


# A driver's name for a device is matched against the patterns in this order. Memory is in MiB, as
# the driver counts it (nvidia-smi, rocm-smi); the source of other numbers is named.
DEVICES = (
    DeviceSpec(
        name="B200",
        memory=183359 * _MEBI,
        peaks=_peaks(2250, 75, 37),
        bandwidth=7.7e12,
        inside=LINKS["NVLink 5"],
        between=_NDR,
        source="NVIDIA HGX B200 data sheet, without sparsity",
        driver_pattern="G?B200",
    ),
    DeviceSpec(
        name="H200",
        memory=143771 * _MEBI,
        peaks=_peaks(989, 67, 67),
        bandwidth=4.8e12,
        inside=LINKS["NVLink 4"],
        between=_NDR,
        source="NVIDIA H200 data sheet, without sparsity",
        driver_pattern="G?H200",
        aliases=("H200 SXM",),
    ),
    DeviceSpec(
        name="H100 PCIe",
        memory=81559 * _MEBI,
        peaks=_peaks(756, 51, 51),
        bandwidth=2.0e12,
        inside=LINKS["PCIe 5.0 x16"],
        between=_ETHERNET,
        source="NVIDIA H100 data sheet (PCIe), without sparsity",
        driver_pattern="H100 PCIe",
    ),
    DeviceSpec(
        name="H100",
        memory=81559 * _MEBI,
        peaks=_peaks(989, 67, 67),
        bandwidth=3.35e12,
        inside=LINKS["NVLink 4"],
        between=_NDR,
        source="NVIDIA H100 data sheet (SXM), without sparsity",
        driver_pattern="H100",
        aliases=("H100 SXM", "H100 80GB"),
    ),
    DeviceSpec(
        name="A100 40GB",
        memory=40960 * _MEBI,
        peaks=_peaks(312, 19.5, 19.5),
        bandwidth=1.555e12,
        inside=LINKS["NVLink 3"],
        between=_HDR,
        source="NVIDIA A100 data sheet (SXM, 40 GB)",
        driver_pattern="A100.*40GB",
        aliases=("A100 SXM 40GB",),
    ),
    DeviceSpec(
        name="A100",
        memory=81920 * _MEBI,
        peaks=_peaks(312, 19.5, 19.5),
        bandwidth=2.039e12,
        inside=LINKS["NVLink 3"],
        between=_HDR,
        source="NVIDIA A100 data sheet (SXM, 80 GB)",
        driver_pattern="A100",
        aliases=("A100 80GB", "A100 SXM"),
    ),
    DeviceSpec(
        name="L40S",
        memory=46068 * _MEBI,
        peaks=_peaks(362, 91.6),
        bandwidth=864e9,
        inside=LINKS["PCIe 4.0 x16"],
        between=_ETHERNET,
        source="NVIDIA L40S data sheet, without sparsity",
        driver_pattern="L40S",
    ),
    DeviceSpec(
        name="RTX 4090",
        memory=24564 * _MEBI,
        peaks=_peaks(165, 82.6),
        bandwidth=1.008e12,
        inside=LINKS["PCIe 4.0 x16"],
        between=_ETHERNET,
        source="NVIDIA Ada architecture white paper (f32 accumulation)",
        driver_pattern="RTX 4090",
        aliases=("4090",),
    ),
    DeviceSpec(
        name="RTX 3090",
        memory=24576 * _MEBI,
        peaks=_peaks(71, 35.6),
        bandwidth=936e9,
        inside=LINKS["PCIe 4.0 x16"],
        between=_ETHERNET,
        source="NVIDIA GA102 architecture white paper (f32 accumulation)",
        driver_pattern="RTX 3090",
        aliases=("3090",),
    ),
    DeviceSpec(
        name="V100",
        memory=32510 * _MEBI,
        peaks=_peaks(125, 15.7, 7.8, bf16=False),
        bandwidth=900e9,
        inside=LINKS["NVLink 2"],
        between=_EDR,
        source="NVIDIA V100 data sheet (SXM2, 32 GB)",
        driver_pattern="V100",
        aliases=("V100 32GB", "V100 SXM2"),
    ),
    DeviceSpec(
        name="MI300X",
        memory=196592 * _MEBI,
        peaks=_peaks(1307, 163.4, 81.7),
        bandwidth=5.3e12,
        inside=LINKS["Infinity Fabric"],
        between=_ROCE,
        source="AMD Instinct MI300X data sheet",
        # without the card's name only the architecture is known; it has MI300X or MI325X
        driver_pattern="(MI300X|MI325X|AMD gfx942)",
    ),
    DeviceSpec(
        name="MI250X",
        memory=65520 * _MEBI,
        peaks=_peaks(191.5, 23.95, 23.95),
        bandwidth=1.6e12,
        inside=_xgmi(4, 36.0, "MI200"),
        between=_HDR,
        source="AMD Instinct MI250X data sheet, halved: a device is one of a card's two dies",
        driver_pattern="MI250X",
    ),
)


def peak(name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device by the name that its driver gives it; None where no data sheet is on
    file.
    """
    for device in DEVICES:
        if re.search(rf"(?<![A-Za-z0-9]){device.driver_pattern}(?![A-Za-z0-9])", name):
            return device.peaks.get(precision)
    return None


def device_spec(name: str, where: str) -> DeviceSpec:
    """The device of a name that a user writes; spaces, dashes and case don't count.

    UserError: it is not on file.
    """
    known = {_plain(word): device for device in DEVICES for word in (device.name, *device.aliases)}
    if _plain(name) in known:
        return known[_plain(name)]
    near = difflib.get_close_matches(_plain(name), known, 1, 0.6)
    hint = f"did you mean {_without_spaces(known[near[0]])}? " if near else ""
    raise UserError(
        f"{name!r} is not a device on file",
        f"{hint}on file: {', '.join(map(_without_spaces, DEVICES))}; a JSON file describes any"
        " other (docs/plan.md)",
        where,
    )


def link_spec(name: str, where: str) -> LinkSpec:
    """The link of a name that a user writes. UserError: it is not on file."""
    known = {_plain(word): link for word, link in LINKS.items()}
    if _plain(name) in known:
        return known[_plain(name)]
    raise UserError(
        f"{name!r} is not a link on file",
        f'on file: {", ".join(LINKS)}; or {{"name": ..., "bandwidth": "50 GB/s"}}',
        where,
    )


def _without_spaces(device: DeviceSpec) -> str:
    """The device's name as --machine takes it."""
    return device.name.replace(" ", "")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
