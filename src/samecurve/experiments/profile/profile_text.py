"""A profile in words and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.core.measurement.profile_types import (
    MEANING,
    PARTS,
    Operation,
    ProfileSchedule,
    RankProfile,
    durations,
    mean_parts,
    operations,
    rate,
    slowest,
)
from samecurve.core.planning.plan import Plan
from samecurve.observe.plan_text import arithmetic, strategy_text
from samecurve.observe.text_table import Column, table_text
from samecurve.units import show_bytes

_MODULES = 4  # modules shown of those that keep most for backward
_NAME_WIDTH = 40  # characters of an operation's name
_SHAPES_WIDTH = 60
_UNEVEN = 1.5  # a remedy is shown if the slowest takes this many times the fastest's time


@dataclass(frozen=True)
class TraceFile:
    """A trace file."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Measurements of all ranks of a plan."""

    plan: Plan
    schedule: ProfileSchedule
    ranks: tuple[RankProfile, ...]
    traces: tuple[TraceFile, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a step."""
        return PARTS[self.plan.layout.engine]

    @property
    def peaks(self) -> list[int]:
        """Peak bytes of each device."""
        return [peak for rank in self.ranks for peak in rank.peaks]


def head(plan: Plan, schedule: ProfileSchedule) -> str:
    return (
        f"profile {strategy_text(plan)}, world {plan.layout.num_devices}, {plan.compute.precision},"
        f" {arithmetic(plan)}: {schedule.warm} steps to warm up, {schedule.timed} timed,"
        f" {schedule.traced} under the profiler"
    )


def as_text(profile: Profile, top: int) -> str:
    """The profile as text. top: number of costliest operations."""
    lines = [
        *_step_lines(profile),
        *_part_lines(profile),
        *_slowest_lines(profile),
        *_operation_lines(profile, top),
        *_memory_lines(profile),
        *_trace_lines(profile),
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    decimals = 2 if seconds < 0.01 else 1
    return f"{seconds * 1e3:.{decimals}f}"


def _percent(part: float, total: float) -> str:
    return f"{100 * _share(part, total):.1f} %"


def _share(part: float, total: float) -> float:
    if not total:
        return 0.0
    return part / total


def _step_lines(profile: Profile) -> list[str]:
    seconds = durations(profile.ranks)
    timed = profile.schedule.timed
    tail = timed - len(seconds)
    steps = f"{len(seconds)} steps; {rate(profile.ranks):.4g} samples/s"
    if tail:
        steps += f"; {tail} of {timed} were an epoch's short tail, and are left out"
    first = f"       the first step took {profile.ranks[0].first:.2f} s"
    if profile.plan.layout.engine == "jax" or profile.plan.compiles_blocks:
        first += ", compiling (or reading what was compiled before) included"
    return [
        f"step   {_ms(statistics.median(seconds))} ms median ({_ms(min(seconds))} to"
        f" {_ms(max(seconds))}) of {steps}",
        first,
    ]


def _part_lines(profile: Profile) -> list[str]:
    mean = mean_parts(profile.ranks, profile.parts)
    step = sum(mean.values())
    by_rank = [rank.parts(profile.parts) for rank in profile.ranks]
    several = len(by_rank) > 1
    titles = ["ms a step", "share", *(["by rank"] if several else [])]
    rows = []
    for name in profile.parts:
        seconds = [parts[name] for parts in by_rank]
        extent = [f"{_ms(min(seconds))} to {_ms(max(seconds))}"] if several else []
        share = _percent(mean[name], step)
        rows.append([name, _ms(mean[name]), share, *extent, MEANING[name]])
    total = ["all", _ms(step), _percent(step, step)]
    rows.append([*total, *(["", "the mean step of all ranks"] if several else ["the mean step"])])
    numbers = [Column(title, right=True) for title in titles]
    table = table_text([Column("part"), *numbers, Column("what")], rows)
    return [table, *_queueing_lines(profile)]


def _queueing_lines(profile: Profile) -> list[str]:
    """Lines on the compiled step of engine jax: its collectives and its queueing."""
    first = profile.ranks[0]
    if first.queueing is None:
        return []
    collectives = ""
    if profile.plan.layout.num_devices > 1:
        seconds = sum(operation.seconds for operation in first.operations if operation.collective)
        collectives = (
            f"of which {_ms(seconds)} ms in collectives (under the profiler), waiting for the"
            " slowest device included; "
        )
    return [
        f"       {collectives}queueing a step takes the host {_ms(first.queueing)} ms, while the"
        " device still computes the one before"
    ]


def _slowest_lines(profile: Profile) -> list[str]:
    """A line on the slowest rank or device, for which the others wait."""
    if slowest_rank := slowest(profile.ranks, profile.parts):
        rank, most, least = slowest_rank
        return [
            f"slowest rank {rank}: {_ms(most)} ms of its own in a step, the fastest {_ms(least)}"
            f" ms{_balance_remedy(profile.plan, most, least)}"
        ]
    devices = profile.ranks[0].computing()
    if not devices:
        return []
    most, least = max(devices), min(devices)
    return [
        f"slowest device {devices.index(most)}: {_ms(most)} ms of forward and backward, the"
        f" fastest {_ms(least)} ms{_balance_remedy(profile.plan, most, least)}"
    ]


def _balance_remedy(plan: Plan, most: float, least: float) -> str:
    even = plan.layout.can_be_uneven and not plan.batch.microbatch_seconds
    if even and most > _UNEVEN * least:
        return "; --balance measured would assign it fewer microbatches"
    return ""


def _operation_lines(profile: Profile, top: int) -> list[str]:
    costliest = operations(profile.ranks)
    total = sum(operation.seconds for operation in costliest)
    profiled = statistics.mean(rank.traced for rank in profile.ranks)
    timed = statistics.mean(rank.seconds for rank in profile.ranks)
    if profile.plan.layout.engine == "jax":
        of = "of one device"
    elif len(profile.ranks) > 1:
        of = "of one rank"
    else:
        of = "of a step"
    rows = [
        [
            _cut(operation.name, _NAME_WIDTH),
            f"{operation.calls:.4g}",
            _ms(operation.seconds),
            _percent(operation.seconds, total),
            _cut(operation.what, _SHAPES_WIDTH),
        ]
        for operation in costliest[:top]
    ]
    numbers = [Column(title, right=True) for title in ("calls", "own ms", "share")]
    return [
        f"costly {min(top, len(costliest))} of {len(costliest)} operations, {of}, under the"
        f" profiler (a step takes {_ms(profiled)} ms with it, {_ms(timed)} ms without)",
        table_text([Column("operation"), *numbers, Column("shapes")], rows),
    ]


def _cut(text: str, width: int) -> str:
    """Cut the middle of a long text: operations often differ only in the end of their names."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2 - 2]}...{text[-(width - width // 2 - 1) :]}"


def memory_terms(profile: Profile) -> list[dict[str, Any]]:
    """Memory by term of the plan, with the measured maximum over ranks. None: not known."""
    measured = {
        name: max(rank.memory[name] for rank in profile.ranks) for name in profile.ranks[0].memory
    }
    planned = {term.name: term.bytes for term in profile.plan.memory}
    return [
        {"name": name, "plan_bytes": planned.get(name), "measured_bytes": measured.get(name)}
        for name in {**planned, **measured}
    ]


def _memory_lines(profile: Profile) -> list[str]:
    plan, peaks = profile.plan, profile.peaks
    where = "allocated"
    if plan.layout.devices[0].kind == "cpu":
        where = "a process, its libraries included"
    if plan.memory_estimate:
        estimate = f"the plan expects {show_bytes(plan.memory_estimate)}"
    else:
        estimate = "the plan has no estimate: the model's activations are not known to it"
    peak = show_bytes(max(peaks))
    if len(set(peaks)) > 1:
        peak += f" (device {peaks.index(max(peaks))}; the least: {show_bytes(min(peaks))})"
    rows = []
    for term in memory_terms(profile):
        planned, measured = (
            show_bytes(term[key]) if term[key] is not None else "-"
            for key in ("plan_bytes", "measured_bytes")
        )
        what = ""
        if term["name"] == "temporary":
            what = "what the compiled step holds for a while: gradients, activations"
        rows.append([term["name"], planned, measured, what])
    numbers = [Column("plan", right=True), Column("measured", right=True)]
    lines = [
        f"memory {peak} at most on a device ({where}); {estimate}",
        table_text([Column("term"), *numbers, Column("")], rows),
    ]
    kept_by_module = sorted(profile.ranks[0].kept.items(), key=lambda item: -item[1])
    if kept_by_module:
        modules = [
            f"{name or 'the loss'} ({show_bytes(size)})" for name, size in kept_by_module[:_MODULES]
        ]
        lines.append(f"       most kept for backward by {', '.join(modules)}")
    return lines


def _trace_lines(profile: Profile) -> list[str]:
    lines = [f"trace  {trace.path}  {show_bytes(trace.bytes)}" for trace in profile.traces]
    if lines:
        lines[0] += "; https://ui.perfetto.dev and chrome://tracing open it"
    return lines


def as_json(profile: Profile, name: str, top: int) -> str:
    """The output of --json.

    name: name of the config
    top: number of costliest operations
    """
    plan, ranks = profile.plan, profile.ranks
    slowest_rank = None
    if extremes := slowest(ranks, profile.parts):
        rank, most, least = extremes
        slowest_rank = {"rank": rank, "own_seconds": most, "fastest_own_seconds": least}
    values = {
        "config": name,
        "engine": plan.layout.engine,
        "strategy": plan.layout.strategy,
        "backend": plan.layout.backend,
        "world": plan.layout.num_devices,
        "processes": plan.layout.world_size,
        "precision": plan.compute.precision,
        "batch": plan.batch.global_batch_size,
        "micro": plan.batch.micro_batch_size,
        "rounds": plan.batch.accumulation_steps,
        "device": plan.layout.devices[0].name,
        **measured_json(profile),
        "slowest": slowest_rank,
        "ranks": [_rank_json(rank, profile.parts) for rank in ranks],
        "operations": _operations_json(operations(ranks), top),
        "profiled_seconds": statistics.mean(rank.traced for rank in ranks),
        "memory": {
            "peak_bytes": max(profile.peaks),
            "estimate_bytes": plan.memory_estimate,
            "terms": memory_terms(profile),
        },
        "traces": [{"path": trace.path, "bytes": trace.bytes} for trace in profile.traces],
        "meaning": {name: MEANING[name] for name in profile.parts},
    }
    return json.dumps(values, indent=1)


def _rank_json(rank: RankProfile, parts: Sequence[str]) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "seconds": rank.seconds,
        "own_seconds": rank.busy_seconds(parts),
        "parts": _parts_json(rank.parts(parts)),
        "devices_computing_seconds": list(rank.computing()),
        "memory_bytes_by_device": list(rank.peaks),
        "held_bytes": dict(rank.memory),
        "kept_bytes_by_module": dict(rank.kept),
        "queueing_seconds": rank.queueing,
    }


def measured_json(profile: Profile) -> dict[str, Any]:
    """Numbers of the timed steps, the same in a profile and in a benchmark."""
    seconds = durations(profile.ranks)
    return {
        "steps": {
            "warm_up": profile.schedule.warm,
            "timed": len(seconds),
            "profiled": profile.schedule.traced,
        },
        "seconds": {
            "median": statistics.median(seconds),
            "mean": statistics.mean(seconds),
            "min": min(seconds),
            "max": max(seconds),
            "quartiles": _quartiles(seconds),
            "each": seconds,
            "first": profile.ranks[0].first,
        },
        "samples_per_second": rate(profile.ranks),
        "parts": _parts_json(mean_parts(profile.ranks, profile.parts)),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _parts_json(parts: dict[str, float]) -> dict[str, dict[str, float]]:
    step = sum(parts.values())
    return {
        name: {"seconds": seconds, "share": _share(seconds, step)}
        for name, seconds in parts.items()
    }


def _operations_json(costliest: Sequence[Operation], top: int) -> list[dict[str, Any]]:
    total = sum(operation.seconds for operation in costliest)
    return [
        {
            "name": operation.name,
            "shapes": operation.what,
            "calls": operation.calls,
            "seconds": operation.seconds,
            "share": _share(operation.seconds, total),
            "collective": operation.collective,
        }
        for operation in costliest[:top]
    ]
