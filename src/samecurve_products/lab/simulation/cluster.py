"""A machine one doesn't have, described for plan() and simulation/step_time.py.

It is read from a name (8xH100, 4x8xH200) or a JSON file.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, ValidationError

from samecurve.core.config import Precision, Size
from samecurve.core.planning.hardware import (
    DeviceSpec,
    LinkSpec,
    Medium,
    device_spec,
    link_spec,
    slowest_host_link,
)
from samecurve.core.planning.machine import Link
from samecurve.seam import (
    Device,
    Document,
    InvalidConfigError,
    Machine,
    Section,
    UserError,
    join_key,
    read_document,
    suggest,
)
from samecurve.units import parse_speed

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

WHERE = "--machine"
_FORMS = "8xH100 (one host of eight), 4x8xH200 (four hosts of eight), or a JSON file (docs/plan.md)"
_HELD = "docs/plan.md says what such a file holds"
_MOST = 65536  # devices
_CORES = 16  # default for each device; the default host memory is four times the devices'
# bytes a second; a faster link within a host is assumed to have NVLink's latencies
_FASTEST_PCIE = 64e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal hosts, each with the same number of devices of one kind."""

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    inside: LinkSpec  # link to other devices of the host
    between: LinkSpec  # link to devices of other hosts
    cores: int  # of a host
    host_bytes: int

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def machine(self) -> Machine:
        devices = tuple(
            Device(kind="cuda", index=index, name=self.device.name, memory=self.device.memory)
            for index in range(self.devices_per_host)
        )
        links = tuple(
            Link(
                first=first, second=second, kind=self.inside.medium, bandwidth=self.inside.bandwidth
            )
            for second in range(self.devices_per_host)
            for first in range(second)
        )
        return Machine(
            devices=devices,
            links=links,
            host_bytes=self.host_bytes,
            cores=self.cores,
            hosts=self.hosts,
        )

    def of(self, num_devices: int) -> "Cluster":
        """A cluster of fewer or more devices: a part of one host, or whole hosts."""
        return replace(
            self,
            hosts=max(1, num_devices // self.devices_per_host),
            devices_per_host=min(num_devices, self.devices_per_host),
        )

    def sizes(self, most: int) -> list[int]:
        """Numbers of devices: powers of two within a host, then doubling numbers of hosts."""
        per_host = self.devices_per_host
        within = [1 << power for power in range(per_host.bit_length()) if 1 << power < per_host]
        whole_hosts = [per_host << power for power in range(most.bit_length())]
        return [size for size in (*within, *whole_hosts) if size <= most]

    def __str__(self) -> str:
        host = f"{self.devices_per_host}x{self.device.name}"
        if self.hosts == 1:
            return host
        return f"{self.hosts}x{host}"


def read_cluster(text: str) -> Cluster:
    """Read a name or a file. The UserError says what would be valid."""
    if text.endswith((".json", ".yaml", ".yml")) or "/" in text:
        return _read_file(Path(text))
    match = re.fullmatch(
        r"(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?([A-Za-z].*|\d{4}\b.*)", text.strip(), re.IGNORECASE
    )
    if not match:
        raise UserError(f"{text!r} names no machine", _FORMS, WHERE)
    hosts, count, name = match.groups()
    return _make_cluster(int(hosts or 1), int(count or 1), device_spec(name, WHERE))


def _make_cluster(hosts: int, devices_per_host: int, device: DeviceSpec) -> Cluster:
    """Make a cluster with the usual links of such hosts. UserError: too few or too many devices."""
    num_devices = hosts * devices_per_host
    if not 1 <= num_devices <= _MOST:
        raise UserError(f"{num_devices} devices", f"between 1 and {_MOST}: {_FORMS}", WHERE)
    return Cluster(
        hosts=hosts,
        devices_per_host=devices_per_host,
        device=device,
        inside=device.inside,
        between=device.between,
        cores=_CORES * devices_per_host,
        host_bytes=4 * devices_per_host * device.memory,
    )


def _speed(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    if isinstance(value, str):
        return parse_speed(value)
    raise ValueError("must be a number of bytes a second, or a speed such as 50 GB/s or 400 Gb/s")


Speed = Annotated[float, PlainValidator(_speed)]


class _DeviceFields(Section):
    name: str
    memory: Size
    tflops: dict[Precision, PositiveFloat] = Field(min_length=1)
    bandwidth: Speed


class _LinkFields(Section):
    name: str
    bandwidth: Speed


class _File(Section):
    device: str | _DeviceFields
    devices_per_host: PositiveInt
    hosts: PositiveInt = 1
    inside: str | _LinkFields | None = None
    between: str | _LinkFields | None = None
    cores: PositiveInt | None = None
    host_memory: Size | None = None


_SECTIONS: dict[str, type[Section]] = {
    "device": _DeviceFields,
    "inside": _LinkFields,
    "between": _LinkFields,
}


def _read_file(path: Path) -> Cluster:
    if not path.is_file():
        raise UserError(f"there is no file {path}", _FORMS, WHERE)
    try:
        document = read_document(path)
    except UserError as error:
        if "a config is a mapping" in error.cause:
            raise UserError("should be keys with values", _HELD, error.where) from None
        raise
    try:
        fields = _File.model_validate(document.value)
    except ValidationError as error:
        faults = [_explain(fault, document, str(path)) for fault in _one_fault_each(error)]
        raise InvalidConfigError(faults) from None
    if isinstance(fields.device, _DeviceFields) and fields.inside is None:
        raise UserError(
            "a device that is not on file needs `inside`, its link to other devices of its host",
            '"inside": "PCIe 5.0 x16", or {"name": ..., "bandwidth": "50 GB/s"}',
            str(path),
        )
    device = _read_device(fields.device, document)
    usual = _make_cluster(fields.hosts, fields.devices_per_host, device)
    return replace(
        usual,
        inside=_read_link(fields.inside, device.inside, document, "inside"),
        between=_read_link(fields.between, device.between, document, "between"),
        cores=fields.cores or usual.cores,
        host_bytes=fields.host_memory or usual.host_bytes,
    )


def _read_device(value: str | _DeviceFields, document: Document) -> DeviceSpec:
    if isinstance(value, str):
        return device_spec(value, document.origin_of(("device",)))
    assumed = link_spec("Ethernet 25 Gb/s", WHERE)
    return DeviceSpec(
        name=value.name,
        memory=value.memory,
        peaks={name: teraflops * 1e12 for name, teraflops in value.tflops.items()},
        bandwidth=value.bandwidth,
        inside=assumed,
        between=assumed,
        host=slowest_host_link(),
        source="as the file says",
    )


def _read_link(
    value: str | _LinkFields | None, usual: LinkSpec, document: Document, key: str
) -> LinkSpec:
    if value is None:
        return usual
    if isinstance(value, str):
        return link_spec(value, document.origin_of((key,)))
    medium: Medium = "pcie"
    if key == "between":
        medium = "network"
    elif value.bandwidth > _FASTEST_PCIE:
        medium = "nvlink"
    return LinkSpec(
        name=value.name, bandwidth=value.bandwidth, medium=medium, source="as the file says"
    )


def _one_fault_each(error: ValidationError) -> "list[ErrorDetails]":
    """Keep the faults of the form that the user chose, where a name or a section is allowed."""
    faults: dict[object, ErrorDetails] = {}
    for fault in error.errors(include_url=False):
        key = fault["loc"]
        is_neither = len(key) == 2 and fault["type"] in {"string_type", "model_type"}
        if not is_neither:
            faults.setdefault(key, fault)
        elif not isinstance(fault["input"], dict):
            fault["loc"], fault["msg"] = key[:1], "should be a name or a section"
            faults.setdefault(key[0], fault)
    return list(faults.values())


def _explain(fault: "ErrorDetails", document: Document, path: str) -> UserError:
    forms = {"str", "_DeviceFields", "_LinkFields", "[key]"}
    key = tuple(part for part in fault["loc"] if part not in forms)
    place = document.origin_of(key) or path
    if fault["type"] == "extra_forbidden":
        section: type[Section] = _File
        if len(key) > 1:
            section = _SECTIONS.get(str(key[0]), _File)
        known = sorted(section.model_fields)
        remedy = suggest(str(key[-1]), known) or f"known here: {', '.join(known)}"
        return UserError(f"{join_key(key)}: unknown key", remedy, place)
    if fault["type"] == "missing":
        return UserError(f"{join_key(key)}: missing", _HELD, place)
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return UserError(f"{join_key(key)}: {message} (is {str(fault['input'])[:60]!r})", _HELD, place)
