"""The page of the machine: its devices, how they are connected, and what `bench` has measured."""

import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from samecurve.seam import printable, read_file_bytes, show_bytes
from samecurve_products.page.devices import DeviceNow, Devices
from samecurve_products.page.roots import Root
from samecurve_products.page.tree import SKIPPED, walk
from samecurve_products.report.bench_blocks import bench_blocks
from samecurve_products.report.blocks import (
    Block,
    Cell,
    Page,
    cards,
    details,
    header,
    heading,
    table,
    text,
)
from samecurve_products.report.redact import redact_blocks

_BENCH = "bench.json"
_DEPTH = 4  # directories below a root in which results of bench are looked for
_MOST_DIRECTORIES = 5_000
_MOST_RESULTS = 12
_MOST_BYTES = 1 << 24
_SKIPPED = SKIPPED | {"checkpoints", "logs", "samples"}
_UNKNOWN = "\N{EN DASH}"


def machine_page(devices: Devices, roots: Sequence[Root]) -> Page:
    """The page, as it is now."""
    machine = devices.machine
    items = [
        ("Host", platform.node(), ""),
        ("Processor", machine.cpu or "CPU", f"{machine.cores} cores"),
        ("Memory", show_bytes(machine.host_bytes), "for this process"),
    ]
    blocks: list[Block] = [header("Machine", quiet=devices.detected), cards(items)]
    blocks += _devices(devices)
    blocks += _links(devices)
    blocks += _benches(roots)
    return {"title": "Machine", "blocks": redact_blocks(blocks), "runs": []}


def _devices(devices: Devices) -> Iterator[Block]:
    now = devices.now()
    yield heading("Devices")
    if not now:
        yield text(devices.detected, tone="quiet")
        return
    head = ["Device", "Name", "Memory", "In use", "Utilisation", "Power", "Temperature"]
    yield table(head, [_device_row(device) for device in now])


def _device_row(device: DeviceNow) -> list[Cell]:
    memory, used, busy = device["memory"], device["used"], device["utilisation"]
    power, celsius = device["power_watts"], device["celsius"]
    return [
        f"GPU {device['index']}",
        device["name"],
        _UNKNOWN if memory is None else show_bytes(memory),
        _share(None if used is None else show_bytes(used), used, memory),
        _share(None if busy is None else f"{busy:.0%}", busy, 1.0),
        _UNKNOWN if power is None else f"{power:.0f} W",
        _UNKNOWN if celsius is None else f"{celsius:.0f} \N{DEGREE SIGN}C",
    ]


def _share(shown: str | None, part: float | None, whole: float | None) -> Cell:
    """A cell that is shaded by a share of something."""
    if shown is None or part is None:
        return _UNKNOWN
    return {"text": shown, "share": min(1.0, part / whole)} if whole else shown


def _links(devices: Devices) -> Iterator[Block]:
    """How each two GPUs are connected."""
    links = devices.links()
    if not links:
        return
    count = len(devices.machine.devices)
    rows: list[list[Cell]] = []
    for first in range(count):
        cells = [links.get((first, second), _UNKNOWN) for second in range(count)]
        rows.append([f"GPU {first}", *cells])
    yield heading("Connections")
    yield table(["", *(f"GPU {index}" for index in range(count))], rows)
    yield text(
        "NVLink: direct links, or links through an NVSwitch. PCIe switch: below one switch. CPU:"
        " through one processor. NUMA: through the link between two processors, the slowest path.",
        tone="quiet",
    )


def _benches(roots: Sequence[Root]) -> Iterator[Block]:
    yield heading("Measured by bench")
    benches = find_benches(roots)
    if not benches:
        yield text(
            "No result yet: `samecurve bench -f FILE` measures the speed on 1 to N devices and"
            " writes bench.json, which is shown here.",
            tone="quiet",
        )
    for number, (name, path) in enumerate(benches):
        yield _bench(printable(name), path, is_open=number == 0)


def _bench(name: str, path: Path, *, is_open: bool) -> Block:
    """A result of bench, which can be folded away."""
    try:
        inner = bench_blocks(json.loads(read_file_bytes(path, _MOST_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        return details(name, [text(f"it can't be read: {error}", tone="bad")], is_open=is_open)
    head, *others = inner
    return details(f"{name}: {head['title']}, {head['quiet']}", others, is_open=is_open)


def find_benches(roots: Sequence[Root]) -> list[tuple[str, Path]]:
    """The results of bench below the roots, the newest first: their names and files."""
    benches: dict[Path, tuple[float, str]] = {}
    for root in roots:
        for directory, files in walk(root.path, _DEPTH, _MOST_DIRECTORIES, skipped=_SKIPPED):
            if _BENCH in files:
                path = directory / _BENCH
                with suppress(OSError):
                    written = path.stat().st_mtime
                    benches.setdefault(path, (written, path.relative_to(root.path).as_posix()))
    newest = sorted(benches.items(), key=lambda entry: entry[1][0], reverse=True)
    return [(name, path) for path, (_, name) in newest[:_MOST_RESULTS]]
