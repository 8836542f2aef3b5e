"""`samecurve bench --collectives`: what it costs ranks to pass values on, from 4 KiB up, and the
line through it: latency and bandwidth.

The size of a collective is that of the whole array: what is reduced, gathered, or scattered.
Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): algorithm = size / seconds; bus =
algorithm x 2(n-1)/n for all-reduce, x (n-1)/n for the others, which is what each link carries
whatever the number n of ranks.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from samecurve.core.config.sections import Config
from samecurve.core.planning.layout import Layout, choose_devices, choose_sync
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.strategies import auto_strategy
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.experiments.benched import dumped
from samecurve.experiments.layouts import parse_worlds
from samecurve.experiments.results import Results
from samecurve.experiments.scratch import scratch
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.probe import probe
from samecurve.run.provenance import surroundings
from samecurve.units import show_bytes, show_count
from samecurve.worker.jobs.collectives import CollectiveJob, time_rank

COLLECTIVES = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
}  # how often an element passes a link, nearly
SIZES = tuple(4096 << power for power in range(0, 17, 2))  # 4 KiB to 256 MiB
_TIMES = 20
_LONGEST = 8.0  # seconds for one size: larger ones are left out
_PATIENCE = 300.0
_ROOM = 1 / 16  # of a device's memory: the largest array, of which there are copies on their way


@dataclass(frozen=True)
class Timed:
    """One size. seconds: the median of what the slowest rank took."""

    bytes: int
    seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class Curve:
    """One collective on so many ranks.

    seconds(size) = alpha_seconds + bus_factor x size / bytes_per_second. misfit: the largest share
    by which that is off. cut: why larger sizes are missing. failed: why all are.
    """

    name: str
    world: int
    backend: str
    bus_factor: float
    sizes: tuple[Timed, ...] = ()
    alpha_seconds: float | None = None
    bytes_per_second: float | None = None
    misfit: float | None = None
    cut: str = ""
    failed: str = ""


def bus_factor(name: str, world: int) -> float:
    return COLLECTIVES[name] * (world - 1) / world


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds at size 0, seconds a byte) of the line whose errors are least as shares of what was
    measured, so that small sizes count as much as large ones. Neither is negative.
    """
    x, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    (alpha, slope), *_ = np.linalg.lstsq(
        np.stack([1 / t, x / t], axis=1), np.ones_like(t), rcond=None
    )
    if alpha < 0:  # the line through zero
        return 0.0, float(np.sum(x / t) / np.sum((x / t) ** 2))
    return float(alpha), max(float(slope), 0.0)


def bench_collectives(config: Config, worlds: str | None, to: Path | None, json: bool) -> int:
    """Prints as it goes; returns the exit code: 1 if a collective failed.

    UserError: there are no ranks for it.
    """
    machine = probe()
    there = choose_devices(config, machine).value
    results = None if json and to is None else Results.at(to, "bench", "collectives")
    counts = parse_worlds(worlds) if worlds is not None else [_all(there, machine)]
    found: list[Curve] = []
    for world in counts:
        devices, backend = _ranks(config, machine, there, world)
        if not json:
            click.echo(_head(devices, backend))
        with scratch("bench") as home, pool(world, home / "ranks.log", _PATIENCE) as ranks:
            for curve in curves(devices, backend, max(1, machine.cores // world), ranks):
                found.append(curve)
                if not json:
                    click.echo("\n".join(_lines(curve)))
    said = as_json(found, there, surroundings("torch", machine))
    written = (
        results.publish({"bench.json": dumped(said).encode()})
        if results and any(curve.sizes for curve in found)
        else []
    )
    click.echo(
        dumped(said) if json else "\n".join([_LEGEND, *(f"wrote  {path}" for path in written)])
    )
    return 1 if any(curve.failed for curve in found) else 0


def _all(there: Sequence[Device], machine: Machine) -> int:
    return (
        len(there) if there[0].kind == "cuda" or len(there) > 1 else max(2, min(machine.cores, 8))
    )


def _ranks(
    config: Config, machine: Machine, there: Sequence[Device], world: int
) -> tuple[tuple[Device, ...], str]:
    """One on each device. UserError: there are too few of them."""
    gpus = there[0].kind == "cuda"
    if world < 2 or (gpus and world > len(there)):
        raise UserError(
            (
                "one rank has nobody to pass values on to"
                if world < 2
                else f"{world} GPUs are asked for, {len(there)} are there"
            ),
            "--worlds 2 on two GPUs or more, or --devices cpu:4 for CPU ranks",
            "--worlds",
        )
    devices = tuple(there[:world]) if gpus else machine.ranks_on_cpu(world)
    layout = Layout(
        spec=auto_strategy("torch", "the model fits"),
        devices=devices,
        world_size=world,
        shards=1,
        every_rank_every_round=False,
    )
    return devices, choose_sync(config, layout).value


def curves(
    devices: Sequence[Device],
    backend: str,
    threads: int,
    ranks: Pool,
    sizes: Sequence[int] = SIZES,
    times: int = _TIMES,
) -> Iterator[Curve]:
    """One collective after the other. What a backend doesn't have fails, and the others go on."""
    room = min(device.memory for device in devices) * _ROOM
    for name in COLLECTIVES:
        factor = bus_factor(name, len(devices))
        try:
            timed, cut = _timed(
                name,
                devices,
                backend,
                threads,
                ranks,
                [size for size in sizes if size <= room],
                times,
            )
        except SamecurveError as error:
            yield Curve(name, len(devices), backend, factor, failed=error.cause)
            continue
        if not cut and len(timed) < len(sizes):
            cut = f"larger ones would need more than {_ROOM:.0%} of a device's memory"
        alpha, slope = fit([factor * one.bytes for one in timed], [one.seconds for one in timed])
        misfit = max(
            abs(alpha + slope * factor * one.bytes - one.seconds) / one.seconds for one in timed
        )
        yield Curve(
            name,
            len(devices),
            backend,
            factor,
            tuple(timed),
            alpha,
            1 / slope if slope else None,
            misfit,
            cut,
        )


def _timed(
    name: str,
    devices: Sequence[Device],
    backend: str,
    threads: int,
    ranks: Pool,
    sizes: Sequence[int],
    times: int,
) -> tuple[list[Timed], str]:
    """RunError: it can't be, or a rank was lost."""
    found: list[Timed] = []
    world = len(devices)
    for size in sizes:
        if found and found[-1].seconds * size / found[-1].bytes * times > _LONGEST:
            return found, f"{show_bytes(size)} would take more than {_LONGEST:g} s"
        whole = -(-size // (4 * world)) * 4 * world
        try:
            job = CollectiveJob(
                name=name,
                bytes=whole,
                times=times,
                places=[device.place for device in devices],
                threads=threads,
            )
            each = ranks.run(world, time_rank, job, backend=backend)
        except JobFailedError as error:
            raise RunError(error.cause.splitlines()[0], error.remedy) from None
        took = statistics.median(max(one) for one in zip(*each, strict=True))
        found.append(Timed(whole, took, whole / took, whole / took * bus_factor(name, world)))
    return found, ""


def as_json(
    found: Sequence[Curve], there: Sequence[Device], environment: dict[str, Any]
) -> dict[str, Any]:
    formulas = {
        "seconds": "alpha_seconds + bus_factor * bytes / bytes_per_second",
        "algorithm_bytes_per_second": "bytes / seconds",
        "bus_bytes_per_second": "bus_factor * bytes / seconds",
    }
    return {
        "collectives": [asdict(curve) for curve in found],
        "device": there[0].name,
        "kind": there[0].kind,
        "formulas": formulas,
        "environment": environment,
    }


_LEGEND = (
    "rates  algorithm: bytes / seconds; bus: x 2(n-1)/n for all-reduce, x (n-1)/n for the others,"
    " as nccl-tests has them; line: latency + bytes on the bus / bandwidth"
)


def _head(devices: Sequence[Device], backend: str) -> str:
    kind = "CPU ranks" if devices[0].kind == "cpu" else "GPUs"
    return "\n".join(
        [
            (
                f"bench  collectives over {backend}, {len(devices)} {kind} on {devices[0].name},"
                f" f32; median of {_TIMES}, the slowest rank's"
            ),
            f"       {'collective':<15} {'bytes':>10} {'ms':>10} {'algorithm':>12} {'bus':>12}",
        ]
    )


def _lines(curve: Curve) -> list[str]:
    if curve.failed:
        return [f"       {curve.name:<15} failed: {curve.failed}"]
    rows = [
        f"       {curve.name:<15} {show_bytes(one.bytes):>10} {one.seconds * 1e3:>10.4g}"
        f" {_rate(one.algorithm_bytes_per_second):>12} {_rate(one.bus_bytes_per_second):>12}"
        for one in curve.sizes
    ]
    bandwidth = _rate(curve.bytes_per_second) if curve.bytes_per_second else "no end of it"
    line = (
        f"       {curve.name:<15} line: {curve.alpha_seconds or 0:.3g} s + bytes on the bus /"
        f" {bandwidth}; off by {curve.misfit or 0:.0%} at most"
    )
    return [*rows, line, *([f"         {curve.cut}"] if curve.cut else [])]


def _rate(bytes_per_second: float) -> str:
    return f"{show_count(bytes_per_second)}B/s"
