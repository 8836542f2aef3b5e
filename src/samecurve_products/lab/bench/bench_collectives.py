"""`samecurve bench --collectives`: how long collectives take between ranks, from 4 KiB up.

A line is fitted to the timings: latency and bandwidth.

The size of a collective is that of the whole array: what is reduced, gathered, or scattered.
Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): algorithm = size / seconds; bus =
algorithm x 2(n-1)/n for all-reduce, x (n-1)/n for the others, which is what each link carries
whatever the number n of ranks.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.core.planning.layout import choose_sync
from samecurve.core.strategies import auto_strategy
from samecurve.experiments.layouts import parse_worlds
from samecurve.experiments.output_directory import OutputDirectory
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.run.directory.attempt import surroundings
from samecurve.seam import (
    Column,
    Config,
    Device,
    Machine,
    RunError,
    SamecurveError,
    UserError,
    choose_devices,
    echo,
    probe,
    scratch,
    show_bytes,
    table_text,
)
from samecurve.units import show_rate
from samecurve_products.lab.bench.bench_text import dump_json
from samecurve_products.lab.collectives_job import CollectiveJob, bus_factor, time_rank

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
SIZES = tuple(4096 << power for power in range(0, 17, 2))  # 4 KiB to 256 MiB
_TIMES = 20
_LONGEST = 8.0  # seconds for one size: larger ones are left out
_PATIENCE = 300.0
_ROOM = 1 / 16  # the largest array's share of a device's memory, which also holds copies


@dataclass(frozen=True)
class Timing:
    """Timings of one size; the fields are keys of bench.json."""

    bytes: int
    seconds: float  # median of the slowest rank's time
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Timings of one collective on a number of ranks; the fields are keys of bench.json.

    seconds(size) = alpha_seconds + bus_factor x size / bytes_per_second
    """

    name: str
    world: int
    backend: str
    bus_factor: float
    sizes: tuple[Timing, ...] = ()
    alpha_seconds: float | None = None
    bytes_per_second: float | None = None
    misfit: float | None = None  # largest relative error of the line
    cut: str = ""  # why larger sizes are missing
    failed: str = ""  # why all sizes are missing


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks of a collective, one on each device."""

    devices: tuple[Device, ...]
    backend: str
    threads: int  # of a rank
    ranks: Pool

    @property
    def size(self) -> int:
        return len(self.devices)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit a line with the least relative errors, so that small sizes count as much as large ones.

    Returns (seconds at size 0, seconds a byte). Neither is negative.
    """
    x, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    (alpha, slope), *_ = np.linalg.lstsq(
        np.stack([1 / t, x / t], axis=1), np.ones_like(t), rcond=None
    )
    if alpha < 0:  # the line through zero
        return 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
    return float(alpha), max(float(slope), 0.0)


def bench_collectives(config: Config, *, worlds: str | None, to: Path | None, as_json: bool) -> int:
    """Measure and print collectives; return the exit code: 1 if a collective failed.

    worlds: the value of --worlds; None: all devices
    to: directory for bench.json; None: bench/collectives-TIME, or no file with as_json

    UserError: there are too few devices.
    """
    machine = probe()
    usable = choose_devices(config.devices, config.engine, machine).value
    output = None if as_json and to is None else OutputDirectory.at(to, "bench", "collectives")
    counts = parse_worlds(worlds) if worlds is not None else [_most_ranks(usable, machine)]
    measured: list[Curve] = []
    for world in counts:
        devices = _devices_of_ranks(machine, usable, world)
        backend = _backend(config, devices)
        if not as_json:
            echo(_head(devices, backend))
        with scratch("bench") as home, pool(world, home / "ranks.log", _PATIENCE) as ranks:
            threads = max(1, machine.cores // world)
            group = RankGroup(devices=devices, backend=backend, threads=threads, ranks=ranks)
            for curve in measure_curves(group):
                measured.append(curve)
                if not as_json:
                    echo(_curve_text(curve))
    values = dump_json(_json(measured, usable[0], surroundings("torch", machine)))
    written = []
    if output and any(curve.sizes for curve in measured):
        written = output.publish({"bench.json": values.encode()})
    if as_json:
        echo(values)
    else:
        echo("\n".join([_LEGEND, *(f"wrote  {path}" for path in written)]))
    return 1 if any(curve.failed for curve in measured) else 0


def _most_ranks(usable: Sequence[Device], machine: Machine) -> int:
    if usable[0].kind == "cuda" or len(usable) > 1:
        return len(usable)
    return max(2, min(machine.cores, 8))


def _devices_of_ranks(machine: Machine, usable: Sequence[Device], world: int) -> tuple[Device, ...]:
    """Choose a device for each rank. UserError: there are too few."""
    remedy = "--worlds 2 on two GPUs or more, or --devices cpu:4 for CPU ranks"
    if world < 2:
        raise UserError("one rank has nobody to pass values on to", remedy, "--worlds")
    if usable[0].kind != "cuda":
        return machine.ranks_on_cpu(world)
    if world > len(usable):
        raise UserError(f"{world} GPUs are asked for, {len(usable)} are there", remedy, "--worlds")
    return tuple(usable[:world])


def _backend(config: Config, devices: tuple[Device, ...]) -> str:
    spec = auto_strategy("torch", "the model fits")
    return choose_sync(config.devices.sync, spec, devices).value


def measure_curves(
    group: RankGroup, sizes: Sequence[int] = SIZES, times: int = _TIMES
) -> Iterator[Curve]:
    """Measure one collective after the other. If a backend lacks one, the others still run.

    sizes: bytes of the whole array
    times: how often each size is timed
    """
    room = min(device.memory for device in group.devices) * _ROOM
    fitting = [size for size in sizes if size <= room]
    for name in COLLECTIVES:
        factor = bus_factor(name, group.size)
        curve = Curve(name=name, world=group.size, backend=group.backend, bus_factor=factor)
        try:
            timings, cut = _time_sizes(name, group, fitting, times)
        except SamecurveError as error:
            yield replace(curve, failed=error.cause)
            continue
        if not cut and len(timings) < len(sizes):
            cut = f"larger ones would need more than {_ROOM:.0%} of a device's memory"
        alpha, slope = fit(
            [factor * timing.bytes for timing in timings], [timing.seconds for timing in timings]
        )
        errors = [
            abs(alpha + slope * factor * timing.bytes - timing.seconds) / timing.seconds
            for timing in timings
        ]
        yield replace(
            curve,
            sizes=tuple(timings),
            alpha_seconds=alpha,
            bytes_per_second=1 / slope if slope else None,
            misfit=max(errors),
            cut=cut,
        )


def _time_sizes(
    name: str, group: RankGroup, sizes: Sequence[int], times: int
) -> tuple[list[Timing], str]:
    """Time the sizes; the text says why larger ones were left out. RunError: a rank was lost."""
    timings: list[Timing] = []
    places = [device.place for device in group.devices]
    element_bytes = 4 * group.size  # so that each rank has as many f32 elements
    for size in sizes:
        if timings and timings[-1].seconds * size / timings[-1].bytes * times > _LONGEST:
            return timings, f"{show_bytes(size)} would take more than {_LONGEST:g} s"
        rounded = -(-size // element_bytes) * element_bytes
        job = CollectiveJob(
            name=name, bytes=rounded, times=times, places=places, threads=group.threads
        )
        try:
            by_rank = group.ranks.run(group.size, time_rank, job, backend=group.backend)
        except JobFailedError as error:
            raise RunError(error.cause.splitlines()[0], error.remedy) from None
        seconds = statistics.median(max(each) for each in zip(*by_rank, strict=True))
        rate = rounded / seconds
        timings.append(Timing(rounded, seconds, rate, rate * bus_factor(name, group.size)))
    return timings, ""


def _json(measured: Sequence[Curve], device: Device, environment: dict[str, Any]) -> dict[str, Any]:
    formulas = {
        "seconds": "alpha_seconds + bus_factor * bytes / bytes_per_second",
        "algorithm_bytes_per_second": "bytes / seconds",
        "bus_bytes_per_second": "bus_factor * bytes / seconds",
    }
    return {
        "collectives": [asdict(curve) for curve in measured],
        "device": device.name,
        "kind": device.kind,
        "formulas": formulas,
        "environment": environment,
    }


_LEGEND = (
    "rates  algorithm: bytes / seconds; bus: x 2(n-1)/n for all-reduce, x (n-1)/n for the others,"
    " as nccl-tests has them; line: latency + bytes on the bus / bandwidth"
)


def _head(devices: Sequence[Device], backend: str) -> str:
    kind = "CPU ranks" if devices[0].kind == "cpu" else "GPUs"
    return (
        f"bench  collectives over {backend}, {len(devices)} {kind} on {devices[0].name}, f32;"
        f" median of {_TIMES}, the slowest rank's"
    )


def _curve_text(curve: Curve) -> str:
    """The table of one collective, and the line that fits its timings."""
    if curve.failed:
        return f"  {curve.name} failed: {curve.failed}"
    rows = [
        [
            show_bytes(timing.bytes),
            f"{timing.seconds * 1e3:.4g}",
            show_rate(timing.algorithm_bytes_per_second),
            show_rate(timing.bus_bytes_per_second),
        ]
        for timing in curve.sizes
    ]
    numbers = [Column(title, right=True) for title in (curve.name, "ms", "algorithm", "bus")]
    bandwidth = "no end of it"
    if curve.bytes_per_second:
        bandwidth = show_rate(curve.bytes_per_second)
    lines = [
        table_text(numbers, rows),
        f"  line: {curve.alpha_seconds or 0:.3g} s + bytes on the bus / {bandwidth}; off by"
        f" {curve.misfit or 0:.0%} at most",
    ]
    if curve.cut:
        lines.append(f"  {curve.cut}")
    return "\n".join(lines)
