"""Data sheets of devices and links, from hardware.yaml: memory, peaks and bandwidths, each with its
source. MFU and `plan --machine` read the same table.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from samecurve.errors import UserError

# The share of its peak FLOP/s that a device is assumed to attain while it computes.
ASSUMED_MFU = 0.4

_GIGA, _TERA, _MEBI = 10**9, 1e12, 1 << 20
Medium = Literal["nvlink", "pcie", "network"]


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A link between devices."""

    name: str
    bandwidth: float  # bytes a second, one way, of each device, as collectives attain them
    medium: Medium  # whose latencies hold (simulation/collectives.py)
    source: str  # of the bandwidth

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "LinkSpec":
        """The link of an entry of hardware.yaml."""
        bandwidth = float(entry["links"] * entry["gigabytes"] * _GIGA)
        return cls(
            name=entry["name"],
            bandwidth=bandwidth,
            medium=entry["medium"],
            source=entry["source"],
        )


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """The data sheet of one device."""

    name: str
    memory: int  # bytes
    peaks: Mapping[str, float]  # dense FLOP/s by precision, without sparsity
    bandwidth: float  # of its memory, bytes a second
    inside: LinkSpec  # within a host, as it is usually built
    between: LinkSpec  # between hosts
    host: LinkSpec  # to its host's memory
    source: str  # of memory, peaks and bandwidth
    driver_pattern: str = ""  # in the name that drivers give it
    aliases: tuple[str, ...] = ()  # other names that a user may write

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "DeviceSpec":
        """The device of an entry of hardware.yaml."""
        return cls(
            name=entry["name"],
            memory=entry["memory"] * _MEBI,
            peaks={name: value * _TERA for name, value in entry["teraflops"].items()},
            bandwidth=float(entry["gigabytes"] * _GIGA),
            inside=LinkSpec.from_entry(entry["inside"]),
            between=LinkSpec.from_entry(entry["between"]),
            host=LinkSpec.from_entry(entry["host"]),
            source=entry["source"],
            driver_pattern=entry["driver_pattern"],
            aliases=tuple(entry.get("aliases", ())),
        )


@cache
def on_file() -> tuple[tuple[LinkSpec, ...], tuple[DeviceSpec, ...]]:
    """All links and devices of the table, in its order."""
    text = (files("samecurve.core.planning") / "hardware.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    links = tuple(map(LinkSpec.from_entry, table["links"]))
    return links, tuple(map(DeviceSpec.from_entry, table["devices"]))


def _device_of(name: str) -> DeviceSpec | None:
    """The device by the name that its driver gives it; None: it is not on file."""
    _, devices = on_file()
    for device in devices:
        if re.search(rf"(?<![A-Za-z0-9]){device.driver_pattern}(?![A-Za-z0-9])", name):
            return device
    return None


def peak(name: str, precision: str) -> float | None:
    """Dense FLOP/s of a device by the name that its driver gives it; None where no data sheet is on
    file.
    """
    device = _device_of(name)
    return device.peaks.get(precision) if device else None


def host_link(name: str) -> LinkSpec | None:
    """The link of a device to its host's memory, by the name that its driver gives it; None: the
    device is not on file.
    """
    device = _device_of(name)
    return device.host if device else None


def slowest_host_link() -> LinkSpec:
    """The link that is assumed of a device that is not on file."""
    links, _ = on_file()
    return min((link for link in links if link.medium == "pcie"), key=lambda link: link.bandwidth)


def device_spec(name: str, where: str) -> DeviceSpec:
    """The device of a name that a user writes; spaces, dashes and case don't count.

    UserError: it is not on file.
    """
    _, devices = on_file()
    known = {_plain(word): device for device in devices for word in (device.name, *device.aliases)}
    if _plain(name) in known:
        return known[_plain(name)]
    near = difflib.get_close_matches(_plain(name), known, 1, 0.6)
    names = {
        device.name: device.name.replace(" ", "") for device in devices
    }  # as --machine takes it
    hint = f"did you mean {names[known[near[0]].name]}? " if near else ""
    raise UserError(
        f"{name!r} is not a device on file",
        f"{hint}on file: {', '.join(names.values())}; a JSON file describes any other"
        " (docs/plan.md)",
        where,
    )


def link_spec(name: str, where: str) -> LinkSpec:
    """The link of a name that a user writes. UserError: it is not on file."""
    links, _ = on_file()
    known = {_plain(link.name): link for link in links}
    if _plain(name) in known:
        return known[_plain(name)]
    raise UserError(
        f"{name!r} is not a link on file",
        f'on file: {", ".join(link.name for link in links)}; or {{"name": ..., "bandwidth":'
        ' "50 GB/s"}',
        where,
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
