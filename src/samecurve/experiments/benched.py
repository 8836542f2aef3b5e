"""A benchmark in words and as JSON: every figure is worked out once, in a row's JSON; table, page
and pictures show that.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.core.profile_types import MEANING, ProfileSchedule
from samecurve.errors import SamecurveError, UserError
from samecurve.experiments.layouts import Layout
from samecurve.experiments.profile_text import Profile, measured_json
from samecurve.observe.plan_text import arithmetic
from samecurve.units import show_bytes, show_count

_USES = {
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "device": "compute",
}  # a part of a step -> its share; the others are shares of their own
_ODD = 1.1  # times what there is to gain
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """A layout, and what plan() makes of it.

    without: options of the config that this strategy does not have. refused: why it can't be.
    """

    layout: Layout
    config: Config
    made: Plan | None = None
    refused: UserError | None = None
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What became of a trial: measured, failed, or neither, if it was refused."""

    trial: Trial
    found: Profile | None = None
    failed: SamecurveError | None = None


@dataclass(frozen=True)
class Bench:
    """What there is to know but the rows.

    plans: of the layouts that can be. load: programs that wanted a core when it began. formulas:
    how the task counts its work. environment: versions, host.
    """

    name: str
    config: Config
    course: ProfileSchedule
    plans: tuple[Plan, ...]
    cores: int
    load: float
    formulas: Mapping[str, str]
    environment: Mapping[str, Any]
    time: float

    @property
    def cpu(self) -> bool:
        return self.plans[0].devices[0].kind == "cpu"

    @property
    def weak(self) -> bool:
        return self.config.batch.samples is None


def row_json(row: Row, base: Profile | None) -> dict[str, Any]:
    """base: what the speed-up is against: the first layout that was measured, which has the fewest
    devices.
    """
    trial, made, error = row.trial, row.trial.made, row.failed or row.trial.refused
    status = "measured" if row.found else "failed" if row.failed else "refused"
    values: dict[str, Any] = {
        "layout": str(trial.layout),
        "status": status,
        "strategy": trial.layout.strategy,
        "world": trial.layout.num_devices,
    }
    if made:
        values |= {
            "engine": made.engine,
            "processes": made.world_size,
            "backend": made.backend,
            "threads": made.threads,
            "batch": made.global_batch_size,
            "micro": made.micro_batch_size,
            "rounds": made.accumulation_steps,
            "slots": list(made.microbatches_per_device),
            "arithmetic": arithmetic(made),
            "without": list(trial.without),
            "warnings": list(made.warnings),
        }
    if error:
        values |= {"why": error.cause, "remedy": error.remedy}
    return values | (_measured(row.found, base or row.found) if row.found else {})


def _measured(found: Profile, base: Profile) -> dict[str, Any]:
    plan, values, against = found.plan, measured_json(found), measured_json(base)
    speed, median = values["samples_per_second"], values["seconds"]["median"]
    speedup = speed / against["samples_per_second"]
    flops = plan.flops_per_step / plan.global_batch_size * speed if plan.flops_per_step else None
    peaks = [peak for one in found.ranks for peak in one.peaks]
    return {
        **values,
        "seconds_per_step": median,
        "tokens_per_second": speed * plan.tokens_per_sample if plan.tokens_per_sample > 1 else None,
        "speedup": speedup,
        "efficiency": speedup * base.plan.num_devices / plan.num_devices,
        "shares": _shares(values["parts"]),
        "flops_per_second": flops,
        "flops_per_second_per_device": flops / plan.num_devices if flops else None,
        "peak_flops": plan.peak_flops,
        "mfu": flops / plan.peak_flops if flops and plan.peak_flops else None,
        "memory_bytes_by_device": peaks,
        "memory_bytes": max(peaks),
        "memory_estimate_bytes": plan.memory_estimate,
    }


def _shares(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for name, part in parts.items():
        found[_USES.get(name, name)] += part["share"]  # type: ignore[assignment]
    return dict(found)


def as_json(bench: Bench, rows: Sequence[Values]) -> dict[str, Any]:
    first = bench.plans[0]
    return {
        "config": bench.name,
        "time": bench.time,
        "engine": first.engine,
        "precision": first.precision,
        "device": first.devices[0].name,
        "kind": first.devices[0].kind,
        "cores": bench.cores,
        "load": bench.load,
        "scaling": "weak" if bench.weak else "strong",
        "tokens_per_sample": first.tokens_per_sample,
        "steps": {"warm_up": bench.course.warm, "timed": bench.course.timed},
        "baseline": baseline(rows),
        "flops_per_sample": first.flops_per_step / first.global_batch_size
        if first.flops_per_step
        else None,
        "flops_formula": bench.formulas.get("flops"),
        "peak_flops_per_device": first.peak_flops / first.num_devices if first.peak_flops else None,
        "layouts": list(rows),
        "notes": notes(bench, rows),
        "environment": dict(bench.environment),
    }


def baseline(rows: Sequence[Values]) -> str | None:
    return next((row["layout"] for row in rows if row["status"] == "measured"), None)


@dataclass(frozen=True)
class Column:
    """title: of the table. cell: of a measured row. left: a text, not a number."""

    title: str
    width: int
    cell: Callable[[Values], str]
    left: bool = False

    def padded(self, text: str) -> str:
        return f"{text:<{self.width}}" if self.left else f"{text:>{self.width}}"


def columns(bench: Bench) -> list[Column]:
    """Of the table and the page, as this benchmark needs them."""
    first = bench.plans[0]
    tokens = first.tokens_per_sample > 1
    found = [Column("ms a step (min to max)", 24, _seconds)]
    if bench.cpu and first.engine == "torch":
        found = [Column("threads", 7, lambda row: f"{row['world']} x {row['threads']}"), *found]
    if bench.config.devices.balance != "even":
        found = [Column("slots", 9, lambda row: " + ".join(map(str, row["slots"]))), *found]
    found += [
        Column(
            "tokens/s" if tokens else "samples/s",
            9,
            lambda row: show_count(row["tokens_per_second" if tokens else "samples_per_second"]),
        ),
        Column("speed-up", 8, lambda row: f"{row['speedup']:.2f}"),
        Column("efficiency", 10, lambda row: f"{row['efficiency']:.1%}"),
        *(
            Column(
                name,
                7,
                lambda row, name=name: (  # type: ignore[misc]
                    f"{row['shares'][name]:.1%}" if name in row["shares"] else "-"
                ),
            )
            for name in ("compute", "sync", "data", "other")
        ),
    ]
    if first.peak_flops and first.flops_per_step:
        found.append(Column("MFU", 6, lambda row: f"{row['mfu']:.1%}" if row["mfu"] else "-"))
    elif first.flops_per_step:
        found.append(Column("TFLOP/s", 7, lambda row: f"{row['flops_per_second'] / 1e12:.3g}"))
    return [*found, Column("memory of a device", 0, _memory, left=True)]


def _seconds(row: Values) -> str:
    took = row["seconds"]
    return f"{took['median'] * 1e3:.4g} ({took['min'] * 1e3:.4g} to {took['max'] * 1e3:.4g})"


def _memory(row: Values) -> str:
    """The first one's apart, since under dp it holds more than the others."""
    first, *others = row["memory_bytes_by_device"]
    if not others or show_bytes(first) == show_bytes(min(others)) == show_bytes(max(others)):
        return show_bytes(first)
    return (
        f"{show_bytes(first)} the first, {show_bytes(max(others))} the"
        f" other{'s at most' if len(others) > 1 else ''}"
    )


def head(bench: Bench, width: int) -> str:
    plan, batch = bench.plans[0], bench.config.batch
    each = f"{batch.per_device}{f' x {batch.accumulate}' if batch.accumulate else ''}"
    scaling = (
        f"weak scaling: the batch grows with the devices, {each} samples on each"
        if bench.weak
        else (
            f"strong scaling: a step is {plan.global_batch_size} samples in every layout, divided among its"
            " devices"
        )
    )
    titles = "  ".join(column.padded(column.title) for column in columns(bench))
    return "\n".join(
        [
            (
                f"bench  {bench.name}, {plan.engine} {plan.precision} on {plan.devices[0].name};"
                f" {scaling}"
            ),
            (
                f"       {bench.course.warm} step{'s' if bench.course.warm > 1 else ''} to warm up,"
                f" thrown away, then {bench.course.timed} timed; each layout in processes of"
                " its own"
            ),
            f"       {'layout':<{width}}  {titles}".rstrip(),
        ]
    )


def line(bench: Bench, row: Values, width: int) -> str:
    """Of the table, with what else is to be said of this row."""
    name = f"       {row['layout']:<{width}}"
    if row["status"] != "measured":
        remedy = f" ({row['remedy']})" if row["remedy"] else ""
        first, *more = row["why"].splitlines()
        return "\n".join(
            [f"{name}  {row['status']}: {first}{remedy}", *(f"         {said}" for said in more)]
        )
    return "\n".join(
        [
            f"{name}  {'  '.join(column.padded(column.cell(row)) for column in columns(bench))}".rstrip(),
            *(f"         without {said}" for said in row["without"]),
        ]
    )


def notes(bench: Bench, rows: Sequence[Values]) -> list[str]:
    """What one must know to read the figures, each with a word in front."""
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        return []
    base = measured[0]
    found = [
        f"base   speed-up: samples a second against {base['layout']}; efficiency: speed-up /"
        f" (devices / {base['world']})"
    ]
    found.append(f"share  of the mean step. {_meaning(bench)}")
    if bench.cpu:
        found += [
            *_of_cores(bench, base, measured),
            f"memory what a process has had resident, libraries included{_shared(measured)}",
        ]
    found += [*_odd(bench, base, measured), *_of_flops(bench)]
    short = [row["layout"] for row in measured if row["steps"]["timed"] < bench.course.timed]
    if short:
        found.append(f"steps  an epoch's short tail is left out: {', '.join(short)}")
    warnings: dict[str, list[str]] = {}
    for row in measured:
        for warning in row["warnings"]:
            warnings.setdefault(warning, []).append(row["layout"])
    return [
        *found,
        *(f"warn   {', '.join(layouts)}: {warning}" for warning, layouts in warnings.items()),
    ]


def _meaning(bench: Bench) -> str:
    compute = (
        f"compute: {MEANING['device']}; what of it is sync is not known"
        if bench.plans[0].engine == "jax"
        else f"compute: forward, backward, optimizer; sync: {MEANING['sync']}"
    )
    return f"{compute}; data: {MEANING['data']}"


def _of_cores(bench: Bench, base: Values, measured: Sequence[Values]) -> list[str]:
    """What a CPU can't show."""
    cores, many = bench.cores, [row["layout"] for row in measured if row["world"] > bench.cores]
    more = [f"cpu    {', '.join(many)}: more ranks than cores, so they take turns"] if many else []
    if bench.plans[0].engine == "jax":
        return [
            (
                f"cpu    CPU devices share {cores} cores and one process's threads: more of them"
                " bring no more cores, so this shows what sharing out costs, not how GPUs scale"
            ),
            *more,
        ]
    threads = {row["layout"]: row["world"] * row["threads"] for row in measured}
    by_count = {
        count: ", ".join(name for name, own in threads.items() if own == count)
        for count in sorted(set(threads.values()))
    }
    dealt = (
        f"each layout has {threads[base['layout']]} threads in all"
        if len(by_count) == 1
        else (
            "threads in all:"
            f" {', '.join(f'{count} ({names})' for count, names in by_count.items())}"
        )
    )
    return [
        f"cpu    ranks share {cores} cores, {dealt}: a speed-up is bounded by cores, here by"
        f" {max(_bound(bench, base, row) for row in measured):.3g}. This shows what sharing out"
        " costs, not how GPUs scale"
        + (
            ""
            if bench.config.devices.threads
            else "; --set devices.threads=1 gives each rank of every layout one thread"
        ),
        *more,
    ]


def _shared(measured: Sequence[Values]) -> str:
    shared = [row for row in measured if row["processes"] < row["world"]]
    names = ", ".join(row["layout"] for row in shared)
    return (
        ""
        if not shared
        else (
            f"; {names}:"
            f" {'divided by' if shared[0]['engine'] == 'jax' else 'of the one process for all'} its"
            " devices"
        )
    )


def _bound(bench: Bench, base: Values, row: Values) -> float:
    """How often the baseline's devices a layout has: cores on the CPU."""
    if bench.cpu and bench.plans[0].engine == "torch":
        return float(
            min(row["world"] * row["threads"], bench.cores)
            / min(base["world"] * base["threads"], bench.cores)
        )
    return float(row["world"] / base["world"])


def _odd(bench: Bench, base: Values, measured: Sequence[Values]) -> list[str]:
    """Doubts: figures that can't be, and a machine that did something else."""
    found = []
    if faster := [
        row["layout"] for row in measured if row["speedup"] > _ODD * _bound(bench, base, row)
    ]:
        found.append(
            f"odd    {', '.join(faster)}: faster than {'cores' if bench.cpu else 'devices'}"
            f" explain, so {base['layout']} was held up, or a smaller share fits caches better"
            + (
                ". Threads of one process wait for each other at every operation: where other"
                " programs want the cores, that costs most"
                if bench.cpu
                else ""
            )
        )
    if bench.cpu and bench.load > max(1.0, bench.cores / 2):
        found.append(
            f"busy   other programs wanted the cores when this began (load {bench.load:.1f} on"
            f" {bench.cores}): the figures are noisy"
        )
    return found


def _of_flops(bench: Bench) -> list[str]:
    plan = bench.plans[0]
    if not plan.flops_per_step:
        return ["flops  neither MFU nor TFLOP/s: the task does not say what a sample costs"]
    work = (
        f"{show_count(plan.flops_per_step / plan.global_batch_size)}FLOP a sample"
        f" ({bench.formulas.get('flops', 'as the task says')})"
    )
    if plan.peak_flops:
        return [
            f"MFU    samples a second x {work} / peak; peak:"
            f" {show_count(plan.peak_flops / plan.num_devices)}FLOP/s a device, dense {plan.precision} of"
            f" the {plan.devices[0].name}'s data sheet"
        ]
    return [
        f"flops  samples a second x {work}; no MFU: the peak of {plan.devices[0].name} is not on"
        " file"
    ]


def dumped(said: Mapping[str, Any]) -> str:
    return json.dumps(said, indent=1)
