"""A machine one doesn't have: from words (8xH100, 4x8xH200) or a JSON file to what plan() and
core/simulation/step_time.py need.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, PlainValidator, PositiveFloat, PositiveInt, ValidationError

from samecurve.core.config.document import Document, join_key, read_file, suggest
from samecurve.core.config.section import Section
from samecurve.core.config.sections import Precision
from samecurve.core.config.values import Size
from samecurve.core.planning.machine import Device, Link, Machine
from samecurve.core.simulation.hardware import DeviceSpec, LinkSpec, device_spec, link_spec
from samecurve.errors import InvalidConfigError, UserError
from samecurve.units import parse_speed

WHERE = "--machine"
_FORMS = "8xH100 (one host of eight), 4x8xH200 (four hosts of eight), or a JSON file (docs/plan.md)"
_HELD = "docs/plan.md says what such a file holds"
_MOST = 65536  # devices
_CORES = 16  # for each device, where a file says nothing; so is host memory four times the devices'
_FASTEST_PCIE = (
    64e9  # bytes a second: a faster link within a host is taken to have NVLink's latencies
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """hosts alike, each with so many devices of one kind.

    inside, between: how a device reaches others of its host, and those of others. cores,
    host_bytes: of a host.
    """

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    inside: LinkSpec
    between: LinkSpec
    cores: int
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

    def of(self, world: int) -> "Cluster":
        """As many of these devices: a part of one host, or whole hosts."""
        return replace(
            self,
            hosts=max(1, world // self.devices_per_host),
            devices_per_host=min(world, self.devices_per_host),
        )

    def sizes(self, most: int) -> list[int]:
        """Numbers of devices that are powers of two within a host, and then whole hosts, doubled."""
        within = [
            1 << power
            for power in range(self.devices_per_host.bit_length())
            if 1 << power < self.devices_per_host
        ]
        return [
            size
            for size in (
                *within,
                *(self.devices_per_host << power for power in range(most.bit_length())),
            )
            if size <= most
        ]

    def __str__(self) -> str:
        name = f"{self.devices_per_host}x{self.device.name}"
        return f"{self.hosts}x{name}" if self.hosts > 1 else name


def read_cluster(text: str) -> Cluster:
    """UserError: neither words that are understood nor a file that is right, with what is."""
    if text.endswith((".json", ".yaml", ".yml")) or "/" in text:
        return _from_file(Path(text))
    found = re.fullmatch(
        r"(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?([A-Za-z].*|\d{4}\b.*)", text.strip(), re.IGNORECASE
    )
    if not found:
        raise UserError(f"{text!r} names no machine", _FORMS, WHERE)
    hosts, count, name = found.groups()
    card = device_spec(name, WHERE)
    return _checked(int(hosts or 1), int(count or 1), card, card.inside, card.between)


def _checked(
    hosts: int, count: int, card: DeviceSpec, inside: LinkSpec, between: LinkSpec
) -> Cluster:
    if not 1 <= hosts * count <= _MOST:
        raise UserError(f"{hosts * count} devices", f"between 1 and {_MOST}: {_FORMS}", WHERE)
    return Cluster(
        hosts=hosts,
        devices_per_host=count,
        device=card,
        inside=inside,
        between=between,
        cores=_CORES * count,
        host_bytes=4 * count * card.memory,
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


class _WireFields(Section):
    name: str
    bandwidth: Speed


class _File(Section):
    device: str | _DeviceFields
    devices_per_host: PositiveInt
    hosts: PositiveInt = 1
    inside: str | _WireFields | None = None
    between: str | _WireFields | None = None
    cores: PositiveInt | None = None
    host_memory: Size | None = None


def _from_file(path: Path) -> Cluster:
    if not path.is_file():
        raise UserError(f"there is no file {path}", _FORMS, WHERE)
    try:
        document = read_file(path)
    except UserError as error:
        keys = "a config is a mapping" not in error.cause
        raise UserError(
            error.cause if keys else "should be keys with values",
            error.remedy if keys else _HELD,
            error.where,
        ) from None
    try:
        fields = _File.model_validate(document.value)
    except ValidationError as error:
        raise InvalidConfigError(
            [_explained(cast("Any", item), document, str(path)) for item in _one_each(error)]
        ) from None
    if isinstance(fields.device, _DeviceFields) and fields.inside is None:
        raise UserError(
            "a device of one's own needs `inside`, how it reaches the others of its host",
            '"inside": "PCIe 5.0 x16", or {"name": ..., "bandwidth": "50 GB/s"}',
            str(path),
        )
    card = _card(fields.device, document)
    inside, between = (
        _wire(fields.inside, card.inside, document, "inside"),
        _wire(fields.between, card.between, document, "between"),
    )
    made = _checked(fields.hosts, fields.devices_per_host, card, inside, between)
    return replace(
        made, cores=fields.cores or made.cores, host_bytes=fields.host_memory or made.host_bytes
    )


def _card(given: "str | _DeviceFields", document: Document) -> DeviceSpec:
    if isinstance(given, str):
        return device_spec(given, document.origin_of(("device",)))
    assumed = link_spec("Ethernet 25 Gb/s", WHERE)
    return DeviceSpec(
        name=given.name,
        memory=given.memory,
        peaks={name: value * 1e12 for name, value in given.tflops.items()},
        bandwidth=given.bandwidth,
        inside=assumed,
        between=assumed,
        source="as the file says",
    )


def _wire(
    given: "str | _WireFields | None", usual: LinkSpec, document: Document, key: str
) -> LinkSpec:
    if given is None:
        return usual
    if isinstance(given, str):
        return link_spec(given, document.origin_of((key,)))
    return LinkSpec(
        name=given.name,
        bandwidth=given.bandwidth,
        medium="network"
        if key == "between"
        else "nvlink"
        if given.bandwidth > _FASTEST_PCIE
        else "pcie",
        source="as the file says",
    )


def _one_each(error: ValidationError) -> list[Mapping[str, Any]]:
    """Where either a word or a section may stand, what is wrong with what was given, not with the
    other.
    """
    found: dict[Any, Mapping[str, Any]] = {}
    for item in error.errors(include_url=False):
        key = item["loc"]
        neither = len(key) == 2 and item["type"] in {"string_type", "model_type"}
        if not (neither and isinstance(item["input"], dict)):
            found.setdefault(
                key[0] if neither else key,
                (
                    {**item, "loc": key[:1], "msg": "should be a name or a section"}
                    if neither
                    else item
                ),
            )
    return list(found.values())


def _explained(item: Mapping[str, Any], document: Document, path: str) -> UserError:
    key = tuple(
        part for part in item["loc"] if part not in {"str", "_DeviceFields", "_WireFields", "[key]"}
    )
    place = document.origin_of(key) or path
    sections: dict[str, type[Section]] = {
        "device": _DeviceFields,
        "inside": _WireFields,
        "between": _WireFields,
    }
    if item["type"] == "extra_forbidden":
        known = sorted((sections.get(str(key[0]), _File) if len(key) > 1 else _File).model_fields)
        return UserError(
            f"{join_key(key)}: unknown key",
            suggest(str(key[-1]), known) or f"known here: {', '.join(known)}",
            place,
        )
    if item["type"] == "missing":
        return UserError(f"{join_key(key)}: missing", _HELD, place)
    return UserError(
        f"{join_key(key)}:"
        f" {item['msg'].removeprefix('Value error, ').replace('Input should', 'should')} (is"
        f" {str(item['input'])[:60]!r})",
        _HELD,
        place,
    )
