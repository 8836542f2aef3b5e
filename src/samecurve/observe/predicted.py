"""What `plan --machine` says: the machine, every strategy beside the others, how the plan's own
step comes about, efficiency by devices.
"""

from collections.abc import Sequence
from typing import Any

from samecurve.core.simulation.cluster import Cluster
from samecurve.core.simulation.collectives import Collective
from samecurve.core.simulation.compare import Curve, StrategyForecast
from samecurve.core.simulation.step_time import StepCost, Utilization
from samecurve.units import show_bytes, show_count, show_time

_WIDTHS = (8, 9, 24, 14, 8, 9, 10, 12, 8, 11)


def machine_lines(setup: Cluster, share: Utilization) -> list[str]:
    card, several = setup.device, setup.hosts > 1
    peaks = ", ".join(f"{name} {value / 1e12:g}" for name, value in card.peaks.items())
    wires = [
        ("within a host", setup.inside, ""),
        ("between hosts", setup.between, "" if several else "; for the curves only"),
    ]
    return [
        (
            f"machine  {setup}: {setup.num_devices} device{'s' if setup.num_devices > 1 else ''} on"
            f" {setup.hosts} host{'s' if several else ''}, not this machine"
        ),
        (
            f"         {card.name}: {show_bytes(card.memory)} at {card.bandwidth / 1e12:.3g} TB/s;"
            f" dense TFLOP/s {peaks} ({card.source})"
        ),
        *(
            f"         {where}: {wire.name}, {wire.bandwidth / 1e9:.4g} GB/s one way from each"
            f" device ({wire.source}){more}"
            for where, wire, more in wires
        ),
        f"         MFU {share.value:.3g} while a device computes: {share.source}",
    ]


def row_lines(rows: Sequence[StrategyForecast], tokens: int) -> list[str]:
    """The table of strategies, and below it why one is refused."""
    unit = "tokens/s" if tokens > 1 else "samples/s"
    lines = [
        _line(
            (
                "strategy",
                "recompute",
                "memory a device",
                "batch on each",
                "a step",
                unit,
                "efficiency",
                "sync exposed",
                "of all",
                "sent a step",
            )
        )
    ]
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if row.plan is None:
            if not row.fits:
                lines.append(
                    _line(
                        (
                            row.label,
                            row.recompute,
                            (
                                f"does not fit: needs {show_bytes(row.need or 0)},"
                                f" {show_bytes(row.room)} can be used"
                            ),
                        )
                    )
                )
            else:
                lines.append(_line((row.label, row.recompute, "refused")))
                refusals.setdefault(row.refused, []).append(row.label)
            continue
        memory = (
            f"{show_bytes(row.held)} of {show_bytes(row.room)}"
            if row.need is not None
            else f"{show_bytes(row.held)} + activations"
        )
        rounds = f"{row.plan.micro_batch_size} x {row.plan.accumulation_steps} round{'s' if row.plan.accumulation_steps > 1 else ''}"
        lines.append(_line((row.label, row.recompute, memory, rounds, *_cost_cells(row, tokens))))
    grouped = dict.fromkeys(row.label for row in rows if not row.whole)
    lines += (
        ["unknown: the task does not say what a sample costs"]
        if any(row.plan and row.cost is None for row in rows)
        else []
    )
    lines += [
        f"{label} is --strategy {label.replace('/', ' --set devices.shards=')}" for label in grouped
    ]
    return lines + [
        f"refused   {', '.join(dict.fromkeys(names))}: {why}" for why, names in refusals.items()
    ]


def _line(cells: Sequence[str]) -> str:
    return "  ".join(
        f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=False)
    ).rstrip()


def _cost_cells(row: StrategyForecast, tokens: int) -> tuple[str, ...]:
    """Without the time of a step where the task does not say what a sample costs."""
    assert row.plan is not None
    assert row.traffic is not None
    sync, sent, cost = show_time(row.traffic.seconds), show_bytes(row.traffic.sent), row.cost
    if cost is None:
        return "unknown", "unknown", "unknown", "unknown", sync, sent
    return (
        show_time(cost.seconds),
        show_count(row.plan.global_batch_size * tokens / cost.seconds),
        f"{cost.efficiency:.1%}",
        show_time(cost.exposed),
        sync,
        sent,
    )


def cost_lines(name: str, cost: StepCost) -> list[str]:
    """Every number of one row with its formula."""
    said = cost.formulas
    lines = [
        f"how a step of {name} comes to {show_time(cost.seconds)}",
        f"  compute     {show_time(cost.compute):<8} {said['compute']}",
        f"  update      {show_time(cost.update):<8} {said['update']}",
    ]
    if cost.traffic.all:
        lines += [
            f"  exposed     {show_time(cost.exposed):<8} {said['sync']}",
            (
                "  collectives alpha + beta x bytes of a ring or, for all-reduce, a tree: the"
                " fastest of NCCL's protocols (src/graph/tuning.cc; Thakur et al. 2005)"
            ),
        ]
        lines += [f"    {_collective(part)}" for part in cost.traffic.all]
    return [
        *lines,
        f"  efficiency  {cost.efficiency:<8.1%} {said['efficiency']}",
        f"  MFU         {cost.mfu:<8.1%} {said['mfu']}",
    ]


def _collective(part: Collective) -> str:
    over = part.group
    where = (
        f"{over.members} devices on {over.hosts} host{'s' if over.hosts > 1 else ''} at"
        f" {over.bandwidth / 1e9:.4g} GB/s"
    )
    return (
        f"{show_time(part.seconds):<8} {part.kind} x {part.messages} of {show_bytes(part.payload)}:"
        f" {part.what}; {where}, {show_time(part.each)} each"
    )


def curve_lines(curves: Sequence[Curve], batch: str) -> list[str]:
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    if not sizes:
        return []
    lines = [
        f"efficiency by devices ({batch})",
        "  devices " + "".join(f"{size:>6}" for size in sizes),
    ]
    for curve in curves:
        found = dict(curve.points)
        lines.append(
            f"  {curve.name:<8}"
            + "".join(f"{found[size]:>6.0%}" if size in found else f"{'-':>6}" for size in sizes)
            + (f"   {_short(curve.ends)}" if curve.ends else "")
        )
    return lines


def _short(why: str, most: int = 90) -> str:
    return why if len(why) <= most else why[: most - 3] + "..."


def as_json(
    setup: Cluster,
    share: Utilization,
    rows: Sequence[StrategyForecast],
    curves: Sequence[Curve],
    tokens: int,
) -> dict[str, Any]:
    """The same as data: bytes, seconds, shares."""
    card = setup.device
    wires = {
        key: {"name": wire.name, "bandwidth": wire.bandwidth, "source": wire.source}
        for key, wire in (("inside", setup.inside), ("between", setup.between))
    }
    device = {
        "device": card.name,
        "memory": card.memory,
        "peaks": dict(card.peaks),
        "memory_bandwidth": card.bandwidth,
        "source": card.source,
    }
    return {
        "machine": {
            "name": str(setup),
            "devices": setup.num_devices,
            "hosts": setup.hosts,
            **device,
            **wires,
        },
        "mfu": {"value": share.value, "source": share.source},
        "rows": [_row_json(row, tokens) for row in rows],
        "curves": [
            {
                "strategy": curve.name,
                "points": [{"devices": size, "efficiency": value} for size, value in curve.points],
                "ends": curve.ends,
            }
            for curve in curves
        ],
    }


def _row_json(row: StrategyForecast, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {
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
        found |= {
            "batch": row.plan.global_batch_size,
            "micro": row.plan.micro_batch_size,
            "rounds": row.plan.accumulation_steps,
            "sync_seconds": row.traffic.seconds,
            "sent_bytes": row.traffic.sent,
        }
        found["collectives"] = [_collective_json(part) for part in row.traffic.all]
    if row.plan and row.cost:
        cost = row.cost
        found |= {
            "seconds": cost.seconds,
            "compute_seconds": cost.compute,
            "update_seconds": cost.update,
            "exposed_seconds": cost.exposed,
            "efficiency": cost.efficiency,
            "mfu": cost.mfu,
            "samples_per_second": row.plan.global_batch_size / cost.seconds,
            "tokens_per_second": row.plan.global_batch_size * tokens / cost.seconds
            if tokens > 1
            else None,
            "formulas": cost.formulas,
        }
    return found


def _collective_json(part: Collective) -> dict[str, Any]:
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
