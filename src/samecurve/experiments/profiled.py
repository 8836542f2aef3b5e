"""A profile in words and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.core.planning.plan import Plan
from samecurve.core.profile_types import (
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
from samecurve.observe.plan_text import arithmetic
from samecurve.units import show_bytes

_KEPT = 4  # modules shown
_NAMED = 40  # characters of an operation's name
_SHAPED = 60
_UNEVEN = 1.5  # times as long as the fastest: worth a remedy


@dataclass(frozen=True)
class Traced:
    """A trace that was written."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Profile:
    """What the ranks of a plan found."""

    plan: Plan
    course: ProfileSchedule
    ranks: tuple[RankProfile, ...]
    traces: tuple[Traced, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return PARTS[self.plan.engine]


def head(plan: Plan, course: ProfileSchedule) -> str:
    over = f" over {plan.backend}" if plan.backend != "none" else ""
    kind = "" if plan.engine == "torch" else f"{plan.engine} "
    return (
        f"profile {kind}{plan.strategy}{over}, world {plan.num_devices}, {plan.precision},"
        f" {arithmetic(plan)}: {course.warm} steps to warm up, {course.timed} timed,"
        f" {course.traced} under the profiler"
    )


def as_text(found: Profile, top: int) -> str:
    return "\n".join(
        [
            *_step(found),
            *_parts(found),
            *_slow(found),
            *_operations(found, top),
            *_memory(found),
            *_traces(found),
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds < 0.01 else 1}f}"


def _step(found: Profile) -> list[str]:
    took = durations(found.ranks)
    left_out = found.course.timed - len(took)
    short = (
        f"; {left_out} of {found.course.timed} were an epoch's short tail, and are left out"
        if left_out
        else ""
    )
    return [
        (
            f"step   {_ms(statistics.median(took))} ms median ({_ms(min(took))} to"
            f" {_ms(max(took))}) of {len(took)} steps; {rate(found.ranks):.4g} samples/s{short}"
        ),
        f"       the first step took {found.ranks[0].first:.2f} s"
        + (
            ", compiling (or reading what was compiled before) included"
            if found.plan.engine == "jax" or found.plan.compile
            else ""
        ),
    ]


def _parts(found: Profile) -> list[str]:
    mean = mean_parts(found.ranks, found.names)
    whole = sum(mean.values())
    each = [one.parts(found.names) for one in found.ranks]
    several = len(each) > 1
    lines = [
        f"       {'part':<10} {'ms a step':>9} {'share':>7}"
        + (f"   {'by rank':<18}" if several else "   ")
        + "what"
    ]
    for name in found.names:
        own = [parts[name] for parts in each]
        ranks = f"   {f'{_ms(min(own))} to {_ms(max(own))}':<18}" if several else "   "
        lines.append(
            f"       {name:<10} {_ms(mean[name]):>9}"
            f" {_share(mean[name], whole):>7}{ranks}{MEANING[name]}"
        )
    return [
        *lines,
        (
            f"       {'all':<10} {_ms(whole):>9} {_share(whole, whole):>7}   the mean"
            f" step{' of all ranks' if several else ''}"
        ),
        *_program(found),
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _program(found: Profile) -> list[str]:
    """What else is known of engine jax's one program."""
    first = found.ranks[0]
    if first.queueing is None:
        return []
    sent = sum(operation.seconds for operation in first.operations if operation.collective)
    several = (
        f"of which {_ms(sent)} ms in collectives (under the profiler), waiting for the slowest"
        " device included; "
        if found.plan.num_devices > 1
        else ""
    )
    return [
        f"       {several}queueing a step takes the host {_ms(first.queueing)} ms, while the device"
        " still computes the one before"
    ]


def _slow(found: Profile) -> list[str]:
    """Who the others wait for."""
    if at := slowest(found.ranks, found.names):
        rank, most, least = at
        return [
            f"slowest rank {rank}: {_ms(most)} ms of its own in a step, the fastest {_ms(least)}"
            f" ms{_remedy(found.plan, most, least)}"
        ]
    devices = found.ranks[0].computing()
    if not devices:
        return []
    return [
        f"slowest device {devices.index(max(devices))}: {_ms(max(devices))} ms of forward and"
        f" backward, the fastest {_ms(min(devices))}"
        f" ms{_remedy(found.plan, max(devices), min(devices))}"
    ]


def _remedy(plan: Plan, most: float, least: float) -> str:
    return (
        "; --balance measured would deal it fewer slots"
        if plan.can_be_uneven and not plan.microbatch_seconds and most > _UNEVEN * least
        else ""
    )


def _operations(found: Profile, top: int) -> list[str]:
    costly = operations(found.ranks)
    whole = sum(operation.seconds for operation in costly)
    traced = statistics.mean(one.traced for one in found.ranks)
    without = statistics.mean(one.seconds for one in found.ranks)
    per = (
        "of one device"
        if found.plan.engine == "jax"
        else "of one rank"
        if len(found.ranks) > 1
        else "of a step"
    )
    lines = [
        (
            f"costly {min(top, len(costly))} of {len(costly)} operations, {per}, under the profiler"
            f" (a step takes {_ms(traced)} ms with it, {_ms(without)} ms without)"
        ),
        f"       {'operation':<{_NAMED}} {'calls':>7} {'own ms':>8} {'share':>7}   shapes",
    ]
    return [*lines, *(_row(operation, whole) for operation in costly[:top])]


def _row(operation: Operation, whole: float) -> str:
    name, what = _cut(operation.name, _NAMED), _cut(operation.what, _SHAPED)
    return (
        f"       {name:<{_NAMED}} {operation.calls:>7.4g} {_ms(operation.seconds):>8}"
        f" {_share(operation.seconds, whole):>7}   {what}".rstrip()
    )


def _cut(text: str, most: int) -> str:
    """Without its middle, where it is too long: how an operation's name ends tells it from others."""
    return (
        text
        if len(text) <= most
        else f"{text[: most // 2 - 2]}...{text[-(most - most // 2 - 1) :]}"
    )


def terms(found: Profile) -> list[dict[str, Any]]:
    """By plan term, and what was measured of it: the most that any rank has. None: not known."""
    measured = {
        name: max(one.memory[name] for one in found.ranks) for name in found.ranks[0].memory
    }
    planned = {term.name: term.bytes for term in found.plan.memory}
    return [
        {"name": name, "plan_bytes": planned.get(name), "measured_bytes": measured.get(name)}
        for name in {**planned, **measured}
    ]


def _memory(found: Profile) -> list[str]:
    plan, peaks = found.plan, [peak for one in found.ranks for peak in one.peaks]
    where = "a process, its libraries included" if plan.devices[0].kind == "cpu" else "allocated"
    estimate = (
        f"the plan expects {show_bytes(plan.memory_estimate)}"
        if plan.memory_estimate
        else "the plan has no estimate: the model's activations are not known to it"
    )
    shown = show_bytes(max(peaks)) + (
        f" (device {peaks.index(max(peaks))}; the least: {show_bytes(min(peaks))})"
        if len(set(peaks)) > 1
        else ""
    )
    lines = [
        f"memory {shown} at most on a device ({where}); {estimate}",
        f"       {'term':<12} {'plan':>10} {'measured':>10}",
    ]
    for term in terms(found):
        planned, measured = (
            show_bytes(term[key]) if term[key] is not None else "-"
            for key in ("plan_bytes", "measured_bytes")
        )
        note = (
            "   what the compiled step holds for a while: gradients, activations"
            if term["name"] == "temporary"
            else ""
        )
        lines.append(f"       {term['name']:<12} {planned:>10} {measured:>10}{note}")
    kept = sorted(found.ranks[0].kept.items(), key=lambda item: -item[1])
    if kept:
        lines.append(
            "       most kept for backward by "
            + ", ".join(f"{name or 'the loss'} ({show_bytes(size)})" for name, size in kept[:_KEPT])
        )
    return lines


def _traces(found: Profile) -> list[str]:
    return [
        f"trace  {trace.path}  {show_bytes(trace.bytes)}"
        + ("; https://ui.perfetto.dev and chrome://tracing open it" if number == 0 else "")
        for number, trace in enumerate(found.traces)
    ]


def as_json(found: Profile, name: str, top: int) -> str:
    plan = found.plan
    at = slowest(found.ranks, found.names)
    return json.dumps(
        {
            "config": name,
            "engine": plan.engine,
            "strategy": plan.strategy,
            "backend": plan.backend,
            "world": plan.num_devices,
            "processes": plan.world_size,
            "precision": plan.precision,
            "batch": plan.global_batch_size,
            "micro": plan.micro_batch_size,
            "rounds": plan.accumulation_steps,
            "device": plan.devices[0].name,
            **measured_json(found),
            "slowest": (
                {"rank": at[0], "own_seconds": at[1], "fastest_own_seconds": at[2]} if at else None
            ),
            "ranks": [
                {
                    "rank": one.rank,
                    "seconds": one.seconds,
                    "own_seconds": one.own(found.names),
                    "parts": _json_parts(one.parts(found.names)),
                    "devices_computing_seconds": list(one.computing()),
                    "memory_bytes_by_device": list(one.peaks),
                    "held_bytes": dict(one.memory),
                    "kept_bytes_by_module": dict(one.kept),
                    "queueing_seconds": one.queueing,
                }
                for one in found.ranks
            ],
            "operations": _json_operations(operations(found.ranks), top),
            "profiled_seconds": statistics.mean(one.traced for one in found.ranks),
            "memory": {
                "peak_bytes": max(peak for one in found.ranks for peak in one.peaks),
                "estimate_bytes": plan.memory_estimate,
                "terms": terms(found),
            },
            "traces": [{"path": trace.path, "bytes": trace.bytes} for trace in found.traces],
            "meaning": {name: MEANING[name] for name in found.names},
        },
        indent=1,
    )


def measured_json(found: Profile) -> dict[str, Any]:
    """What the clock says of the timed steps: the same here and in a benchmark."""
    took = durations(found.ranks)
    return {
        "steps": {
            "warm_up": found.course.warm,
            "timed": len(took),
            "profiled": found.course.traced,
        },
        "seconds": {
            "median": statistics.median(took),
            "mean": statistics.mean(took),
            "min": min(took),
            "max": max(took),
            "quartiles": _quartiles(took),
            "each": took,
            "first": found.ranks[0].first,
        },
        "samples_per_second": rate(found.ranks),
        "parts": _json_parts(mean_parts(found.ranks, found.names)),
    }


def _quartiles(took: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(took) < 2:
        return [took[0], took[0]]
    first, _, third = statistics.quantiles(took, n=4, method="inclusive")
    return [first, third]


def _json_parts(parts: dict[str, float]) -> dict[str, dict[str, float]]:
    whole = sum(parts.values())
    return {
        name: {"seconds": seconds, "share": seconds / whole if whole else 0.0}
        for name, seconds in parts.items()
    }


def _json_operations(found: Sequence[Operation], top: int) -> list[dict[str, Any]]:
    whole = sum(operation.seconds for operation in found)
    return [
        {
            "name": one.name,
            "shapes": one.what,
            "calls": one.calls,
            "seconds": one.seconds,
            "share": one.seconds / whole if whole else 0.0,
            "collective": one.collective,
        }
        for one in found[:top]
    ]
