"""How a draft would run on 1 to N devices: batch, memory, and speed where it can be known.

The speed is predicted where the GPUs' data sheet is on file (as `plan --machine` does), or read
from a bench.json of the same config. Otherwise a text says why not, and what measures it.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samecurve.core.planning.compute import choose_precision
from samecurve.core.planning.hardware import DeviceSpec, on_file
from samecurve.core.planning.planner import plan
from samecurve.core.strategies import STRATEGIES
from samecurve.features.balance import balance_of
from samecurve.observe.plan_text import strategy_text
from samecurve.seam import (
    Config,
    Facts,
    Machine,
    Plan,
    UserError,
    show_bytes,
    show_count,
    show_time,
)
from samecurve_products.lab.simulation.cluster import Cluster
from samecurve_products.lab.simulation.forecast import check_predictable, plan_on_cluster
from samecurve_products.lab.simulation.step_time import ASSUMED, step_cost
from samecurve_products.report.blocks import Block, Cell, table, text

_SPEED = 4  # the first of the columns of a row that tell speeds
_MOST = 8  # devices that are listed without being chosen
_MOST_BENCH = 1 << 22  # bytes of a bench.json
_MOST_FILES = 50


@dataclass(frozen=True)
class World:
    """The draft on a number of devices. plan: None: refused, and `why` says why."""

    devices: int
    plan: Plan | None
    why: str = ""
    seconds: float | None = None  # predicted for a step
    efficiency: float | None = None


def world_blocks(
    config: Config, machine: Machine, facts: Facts, chosen: Plan, *, measured: "Measured"
) -> list[Block]:
    """The table of worlds, and where its speeds are from."""
    on_cpu = chosen.layout.devices[0].kind == "cpu"
    most = max(len(machine.devices), 1) if not on_cpu else machine.cores
    counts = sorted({*_powers(min(most, _MOST)), chosen.layout.num_devices})
    spec = None if on_cpu else _spec(chosen.layout.devices[0].name)
    worlds = []
    for count in counts:
        if count == chosen.layout.num_devices:
            world = World(count, chosen)
        else:
            world = _world(config, machine, facts, count, on_cpu=on_cpu)
        worlds.append(_predicted(world, config, facts, spec, machine))
    rows = [_row(world, chosen, measured) for world in worlds]
    head = ["Devices", "Strategy", "Batch", "Memory a device", "A step", "Samples/s", "Speed-up"]
    if not any(any(row[_SPEED:]) for row in rows):
        head, rows = head[:_SPEED], [row[:_SPEED] for row in rows]
    return [table(head, rows), _source(worlds, chosen, measured, on_cpu=on_cpu, spec=spec)]


def _powers(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2


def _world(config: Config, machine: Machine, facts: Facts, count: int, *, on_cpu: bool) -> World:
    """The config on so many devices; on one, the strategy is that of one device."""
    indices = ",".join(str(device.index) for device in machine.devices[:count])
    use = f"cpu:{count}" if on_cpu else indices
    section: dict[str, Any] = {"use": use}
    spec = STRATEGIES.get((config.engine, config.devices.strategy))
    if count == 1 or (spec and spec.takes_one_device):
        section |= {"strategy": "auto", "shards": None}
    if balance_of(config) not in {"even", "measured"}:
        section["balance"] = "even"  # speeds given by hand are those of other devices
    try:
        return World(count, plan(config.with_values(devices=section), machine, facts))
    except UserError as error:
        return World(count, None, error.cause)


def _spec(name: str) -> DeviceSpec | None:
    """The data sheet of a GPU by the name that its driver gives it; None: it is not on file."""
    _, devices = on_file()
    for device in devices:
        if re.search(rf"(?<![A-Za-z0-9]){device.driver_pattern}(?![A-Za-z0-9])", name):
            return device
    return None


def _predicted(
    world: World, config: Config, facts: Facts, spec: DeviceSpec | None, machine: Machine
) -> World:
    """The world with its predicted step, where that can be predicted."""
    if world.plan is None or spec is None:
        return world
    devices = world.plan.layout.devices
    cluster = Cluster(
        hosts=1,
        devices_per_host=len(devices),
        device=replace(spec, memory=devices[0].memory),
        inside=spec.inside,
        between=spec.between,
        cores=machine.cores,
        host_bytes=machine.host_bytes,
    )
    precision = choose_precision(config.train, config.engine, devices).value
    section = {"use": "all", "strategy": world.plan.layout.strategy}
    there = config.with_values(train={"precision": precision}, devices=section)
    try:
        check_predictable(there, cluster)
        cost = step_cost(there, plan_on_cluster(there, facts, cluster), facts, cluster, ASSUMED)
    except UserError as error:
        return replace(world, why=error.cause)
    if cost is None:
        return replace(world, why="the FLOPs of a sample of this model are not known")
    return replace(world, seconds=cost.seconds, efficiency=cost.efficiency)


def _row(world: World, chosen: Plan, measured: "Measured") -> list[Cell]:
    count = world.devices
    first: Cell = str(count)
    if count == chosen.layout.num_devices:
        first = {"text": f"{count} (chosen)", "tone": "accent"}
    if world.plan is None:
        return [first, {"text": "refused", "note": world.why, "tone": "warn"}, "", "", "", "", ""]
    size = world.plan.global_batch_size
    held = show_bytes(sum(term.bytes for term in world.plan.memory))
    split = f"{size:,} in {world.plan.accumulation_steps} x {world.plan.micro_batch_size}"
    seconds, speedup = world.seconds, ""
    if seconds is not None and world.efficiency is not None:
        speedup = f"{world.efficiency * count:.2f}"
    row = measured.rows.get(count)
    if seconds is None and row is not None:
        seconds, speedup = row["seconds_per_step"], f"{row['speedup']:.2f}"
        size = row.get("global_batch_size") or size
    shown = ["", ""]
    if seconds:
        shown = [show_time(seconds), show_count(size / seconds)]
    return [first, strategy_text(world.plan), split, held, *shown, speedup]


def _source(
    worlds: list[World],
    chosen: Plan,
    measured: "Measured",
    *,
    on_cpu: bool,
    spec: DeviceSpec | None,
) -> Block:
    """Where the speeds are from, or why there are none, and what measures them."""
    if any(world.seconds is not None for world in worlds):
        assumed = f"a device reaches {ASSUMED.value:.0%} of its peak while it computes"
        words = f"Predicted, not measured: {assumed}. {measured.command} measures it."
        return text(words, "quiet")
    if measured.rows:
        where = f"{measured.device} ({measured.where})"
        return text(f"Measured on {where}. {measured.command} measures anew.", "quiet")
    why = next((world.why for world in worlds if world.plan and world.why), "")
    if on_cpu:
        why = "the speed of CPU ranks can't be predicted: no peak of a CPU is on file"
    elif spec is None:
        why = f"no data sheet of {chosen.layout.devices[0].name} is on file"
    return text(f"No speed is shown: {why}. {measured.command} measures it.", "quiet")


@dataclass(frozen=True)
class Measured:
    """Results of `samecurve bench` for the same config, by number of devices."""

    rows: Mapping[int, Mapping[str, Any]]
    device: str
    where: str
    command: str


def find_measured(name: str, home: Path, command: list[str], device: str) -> Measured:
    """The newest bench.json of a config of this name on this device, below home/bench.

    command: what follows `samecurve train`, by which the same would be measured
    """
    typed = f"`{shlex.join(['samecurve', 'bench', *command])}`"
    files = sorted((home / "bench").glob("*/bench.json"), key=lambda file: file.parent.name)
    for file in reversed(files[-_MOST_FILES:]):
        try:
            if file.stat().st_size > _MOST_BENCH:
                continue
            values = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(values, dict) or values.get("config") != name:
            continue
        layouts = values.get("layouts")
        rows = {
            row["world"]: row
            for row in (layouts if isinstance(layouts, list) else [])
            if isinstance(row, dict)
            and all(isinstance(row.get(k), int | float) for k in ("seconds_per_step", "speedup"))
            and isinstance(row.get("world"), int)
        }
        if rows and values.get("device") == device:
            return Measured(rows, str(values["device"]), file.parent.name, typed)
    return Measured({}, "", "", typed)
