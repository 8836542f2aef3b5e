"""The text and JSON of `plan --machine`.

The parts are the machine, a table of strategies, the formulas of the plan's own step, and the
efficiency by number of devices.
"""

from collections.abc import Sequence

from samecurve.core.planning.hardware import LinkSpec
from samecurve.seam import Column, Plan, counted, show_bytes, show_count, show_time, table_text
from samecurve_products.lab.simulation.cluster import Cluster
from samecurve_products.lab.simulation.collectives import Collective
from samecurve_products.lab.simulation.forecast import Curve, StrategyForecast
from samecurve_products.lab.simulation.step_time import StepCost, Utilization

_LONGEST_REASON = 90  # characters of the reason why a curve ends


def machine_lines(cluster: Cluster, utilization: Utilization) -> list[str]:
    """Assumptions about the machine, each number with its source."""
    device = cluster.device
    between = _link_line("between hosts", cluster.between)
    if cluster.hosts == 1:
        between += "; for the curves only"
    peaks = ", ".join(f"{name} {value / 1e12:g}" for name, value in device.peaks.items())
    devices = counted(cluster.num_devices, "device")
    return [
        f"machine  {cluster}: {devices} on {counted(cluster.hosts, 'host')}, not this machine",
        f"         {device.name}: {show_bytes(device.memory)} at"
        f" {device.bandwidth / 1e12:.3g} TB/s; dense TFLOP/s {peaks} ({device.source})",
        _link_line("within a host", cluster.inside),
        between,
        f"         MFU {utilization.value:.3g} while a device computes: {utilization.source}",
    ]


def _link_line(where: str, link: LinkSpec) -> str:
    return (
        f"         {where}: {link.name}, {link.bandwidth / 1e9:.4g} GB/s one way from each device"
        f" ({link.source})"
    )


def row_lines(rows: Sequence[StrategyForecast], tokens: int) -> list[str]:
    """The table of strategies, and below it why some are refused.

    tokens: tokens of a sample; 1: samples have no tokens
    """
    titles = (
        *("strategy", "recompute", "memory a device", "batch on each", "a step"),
        *("tokens/s" if tokens > 1 else "samples/s", "efficiency", "sync exposed", "of all"),
        "sent a step",
    )
    cells = []
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if row.plan:
            cells.append(_planned_cells(row, row.plan, tokens))
        elif row.fits:
            cells.append([row.label, row.recompute, "refused"])
            refusals.setdefault(row.refused, []).append(row.label)
        else:
            why = f"does not fit: {show_bytes(row.need or 0)} of {show_bytes(row.room)}"
            cells.append([row.label, row.recompute, why])
    padded = [each + [""] * (len(titles) - len(each)) for each in cells]
    lines = [table_text([Column(title) for title in titles], padded, indent=0)]
    if any(row.plan and row.cost is None for row in rows):
        lines.append("unknown: the work of a sample is not known")
    for label in dict.fromkeys(row.label for row in rows if not row.whole):
        lines.append(f"{label} is --strategy {label.replace('/', ' --set devices.shards=')}")
    return lines + [
        f"refused   {', '.join(dict.fromkeys(names))}: {why}" for why, names in refusals.items()
    ]


def _planned_cells(row: StrategyForecast, plan: Plan, tokens: int) -> list[str]:
    memory = f"{show_bytes(row.held)} + activations"
    if row.need is not None:
        memory = f"{show_bytes(row.held)} of {show_bytes(row.room)}"
    batch = f"{plan.batch.micro_batch_size} x {counted(plan.batch.accumulation_steps, 'round')}"
    return [row.label, row.recompute, memory, batch, *_cost_cells(row, plan, tokens)]


def _cost_cells(row: StrategyForecast, plan: Plan, tokens: int) -> list[str]:
    """Cells of times and traffic. Times are unknown if the cost of a sample is unknown."""
    assert row.traffic is not None
    sync, sent, cost = show_time(row.traffic.seconds), show_bytes(row.traffic.sent), row.cost
    if cost is None:
        return ["unknown"] * 4 + [sync, sent]
    return [
        show_time(cost.seconds),
        show_count(plan.batch.global_batch_size * tokens / cost.seconds),
        f"{cost.efficiency:.1%}",
        show_time(cost.exposed),
        sync,
        sent,
    ]


def cost_lines(name: str, cost: StepCost) -> list[str]:
    """The formula of every number of one row."""
    formulas = cost.formulas
    rows = [
        ["compute", show_time(cost.compute), formulas["compute"]],
        ["update", show_time(cost.update), formulas["update"]],
    ]
    if cost.copies:
        rows.append(["copies", show_time(cost.copies), formulas["copies"]])
    if cost.traffic.all:
        rows += [
            ["exposed", show_time(cost.exposed), formulas["sync"]],
            [
                "collectives",
                "",
                "alpha + beta x bytes of a ring or, for all-reduce, a tree: the fastest of NCCL's"
                " protocols (src/graph/tuning.cc; Thakur et al. 2005)",
            ],
        ]
        rows += [["", show_time(part.seconds), _collective(part)] for part in cost.traffic.all]
    rows += [
        ["efficiency", f"{cost.efficiency:.1%}", formulas["efficiency"]],
        ["MFU", f"{cost.mfu:.1%}", formulas["mfu"]],
    ]
    columns = [Column("part"), Column("value"), Column("formula")]
    return [
        f"how a step of {name} comes to {show_time(cost.seconds)}",
        table_text(columns, rows, titles=False),
    ]


def _collective(part: Collective) -> str:
    over = part.group
    hosts = counted(over.hosts, "host")
    return (
        f"{part.kind} x {part.messages} of {show_bytes(part.payload)}: {part.what};"
        f" {over.members} devices on {hosts} at {over.bandwidth / 1e9:.4g} GB/s,"
        f" {show_time(part.each)} each"
    )


def curve_lines(curves: Sequence[Curve], batch: str) -> list[str]:
    """A table of efficiency by devices.

    batch: the batch that the curves hold fixed; "" if no strategy fits on the machine asked for
    """
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    if not sizes:
        return []
    rows = []
    for curve in curves:
        efficiency = {size: f"{value:.0%}" for size, value in curve.points}
        why_it_ends = curve.ends
        if len(why_it_ends) > _LONGEST_REASON:
            why_it_ends = f"{why_it_ends[: _LONGEST_REASON - 3]}..."
        rows.append([curve.name, *(efficiency.get(size, "-") for size in sizes), why_it_ends])
    numbers = [Column(str(size), right=True) for size in sizes]
    columns = [Column("devices"), *numbers, Column("")]
    title = f"efficiency by devices ({batch})" if batch else "efficiency by devices"
    return [title, table_text(columns, rows)]


def as_json(
    cluster: Cluster,
    utilization: Utilization,
    rows: Sequence[StrategyForecast],
    curves: Sequence[Curve],
    tokens: int,
) -> dict[str, object]:
    """The prediction as data: bytes, seconds, shares."""
    device = cluster.device
    return {
        "machine": {
            "name": str(cluster),
            "devices": cluster.num_devices,
            "hosts": cluster.hosts,
            "device": device.name,
            "memory": device.memory,
            "peaks": dict(device.peaks),
            "memory_bandwidth": device.bandwidth,
            "source": device.source,
            "inside": _link_json(cluster.inside),
            "between": _link_json(cluster.between),
        },
        "mfu": {"value": utilization.value, "source": utilization.source},
        "rows": [_row_json(row, tokens) for row in rows],
        "curves": [_curve_json(curve) for curve in curves],
    }


def _link_json(link: LinkSpec) -> dict[str, object]:
    return {"name": link.name, "bandwidth": link.bandwidth, "source": link.source}


def _curve_json(curve: Curve) -> dict[str, object]:
    points = [{"devices": size, "efficiency": value} for size, value in curve.points]
    return {"strategy": curve.name, "points": points, "ends": curve.ends}


def _row_json(row: StrategyForecast, tokens: int) -> dict[str, object]:
    value: dict[str, object] = {
        "strategy": row.name,
        "shards": row.shards,
        "recompute": row.recompute,
        "fits": row.fits,
        "refused": row.refused or None,
        "memory_bytes": row.held if row.plan else None,
        "memory_needed_bytes": row.need,
        "memory_usable_bytes": row.room,
    }
    if row.plan and row.traffic:
        value |= {
            "batch": row.plan.batch.global_batch_size,
            "micro": row.plan.batch.micro_batch_size,
            "rounds": row.plan.batch.accumulation_steps,
            "sync_seconds": row.traffic.seconds,
            "sent_bytes": row.traffic.sent,
            "collectives": [_collective_json(part) for part in row.traffic.all],
        }
    if row.plan and row.cost:
        value |= _cost_json(row.cost, row.plan.batch.global_batch_size, tokens)
    return value


def _cost_json(cost: StepCost, global_batch_size: int, tokens: int) -> dict[str, object]:
    return {
        "seconds": cost.seconds,
        "compute_seconds": cost.compute,
        "update_seconds": cost.update,
        "exposed_seconds": cost.exposed,
        "copies_seconds": cost.copies,
        "efficiency": cost.efficiency,
        "mfu": cost.mfu,
        "samples_per_second": global_batch_size / cost.seconds,
        "tokens_per_second": global_batch_size * tokens / cost.seconds if tokens > 1 else None,
        "formulas": cost.formulas,
    }


def _collective_json(part: Collective) -> dict[str, object]:
    over = part.group
    return {
        "kind": part.kind,
        "what": part.what,
        "payload_bytes": part.payload,
        "messages": part.messages,
        "sent_bytes": part.sent,
        "seconds": part.seconds,
        "devices": over.members,
        "hosts": over.hosts,
        "bandwidth": over.bandwidth,
    }
