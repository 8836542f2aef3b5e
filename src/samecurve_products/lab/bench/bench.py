"""`samecurve bench`: time the steps of a config in several layouts on this machine.

The measurement is that of `samecurve profile`, without its profiler. Each layout has processes of
its own: the peak memory of a process never goes down (nor does jax's peak on a GPU), and a layout
that fails does not affect the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.experiments.balance import measure_speeds
from samecurve.experiments.layouts import (
    OF_ONE_DEVICE,
    Layout,
    bench_layouts,
    default_worlds,
    parse_strategies,
    parse_worlds,
)
from samecurve.experiments.output_directory import OutputDirectory
from samecurve.experiments.profile.profile import plan_profile, run_profile
from samecurve.launch.pool import Pool, pool
from samecurve.run.directory.attempt import surroundings
from samecurve.seam import (
    Config,
    Device,
    Facts,
    LoadedConfig,
    Machine,
    SamecurveError,
    UserError,
    choose_devices,
    describe,
    echo,
    entry_of,
    probe,
    scratch,
)
from samecurve.worker.jobs.profile_job import watch_rank
from samecurve_products.lab.bench.bench_page import bench_files
from samecurve_products.lab.bench.bench_results import (
    Bench,
    LayoutPlan,
    LayoutResult,
    row_of,
)
from samecurve_products.lab.bench.bench_text import as_json as bench_json
from samecurve_products.lab.bench.bench_text import dump_json, head, line, notes, table
from samecurve_products.report.bench_blocks import Row, measured_rows
from samecurve_products.report.png import need_matplotlib

_PATIENCE = 3600.0  # seconds for all steps of a layout
_CPU_RANKS = 8  # the most that are tried without --worlds
# options that only some strategies have, and the value that turns each off
_STRATEGY_OPTIONS = {
    "shards": None,
}


def bench(
    loaded: LoadedConfig,
    schedule: ProfileSchedule,
    *,
    worlds: str | None,
    strategies: str | None,
    to: Path | None,
    as_json: bool,
    picture: bool = False,
) -> int:
    """Measure and print layouts; return the exit code: 1 if a layout failed.

    worlds, strategies: values of the flags; None: those of this machine and config
    to: directory for the files; None: bench/NAME-TIME, or no files with as_json
    picture: also write bench.png

    UserError: no layout is possible.
    """
    if picture:
        need_matplotlib("--png")
    machine = probe()
    output = None if as_json and to is None else OutputDirectory.at(to, "bench", loaded.name)
    layouts = choose_layouts(loaded.config, machine, worlds, strategies)
    facts = describe(loaded.config)
    plans = [plan_layout(loaded.config, machine, facts, layout, schedule) for layout in layouts]
    bench = describe_bench(loaded, machine, facts, plans, schedule)
    for hint in loaded.notes:
        echo(f"note   {hint}", err=True)
    if not as_json:
        echo(head(bench))
    rows: list[Row] = []
    for row in measure_layouts(plans, schedule):
        rows.append(row)
        if not as_json:
            echo(line(bench, row))
    written = []
    is_any_measured = bool(measured_rows(rows))
    if output and is_any_measured:
        written = output.publish(bench_files(bench_json(bench, rows), picture=picture))
    if as_json:
        echo(dump_json(bench_json(bench, rows)))
    else:
        shown = [table(bench, rows)] if is_any_measured else []
        shown += [*notes(bench, rows), *(f"wrote  {path}" for path in written)]
        echo("\n".join(shown))
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def choose_layouts(
    config: Config, machine: Machine, worlds: str | None, strategies: str | None
) -> list[Layout]:
    """Choose the layouts. UserError: a flag is wrong, or leaves nothing to measure."""
    if strategies is not None:
        names = parse_strategies(strategies)
    elif config.devices.strategy != "auto":
        names = [config.devices.strategy]
    else:
        names = None
    if worlds is not None:
        counts = parse_worlds(worlds)
    else:
        counts = default_worlds(_max_devices(config, machine, names))
    layouts = bench_layouts(counts, names, config.engine)
    if not layouts:
        raise UserError(
            f"--worlds {worlds}: strategy single takes one device",
            "--worlds 1, or other --strategies",
            "--worlds",
        )
    return layouts


def _max_devices(config: Config, machine: Machine, strategies: Sequence[str] | None) -> int:
    devices = usable_devices(config, machine)
    if strategies is not None and all(name in OF_ONE_DEVICE for name in strategies):
        return 1
    if devices[0].kind == "cpu" and len(devices) == 1:
        return min(max(2, machine.cores), _CPU_RANKS)
    return len(devices)


def usable_devices(config: Config, machine: Machine) -> tuple[Device, ...]:
    """The GPUs that the config names, or CPU ranks."""
    return choose_devices(config.devices, config.engine, machine).value


def plan_layout(
    config: Config, machine: Machine, facts: Facts, layout: Layout, schedule: ProfileSchedule
) -> LayoutPlan:
    """Plan the config's own batch on the first of its devices.

    Options of other strategies are turned off; `without` lists them.
    """
    usable = usable_devices(config, machine)
    if usable[0].kind != "cuda":
        use = f"cpu:{layout.num_devices}"
    elif layout.num_devices > len(usable):
        refusal = UserError(
            f"{layout.num_devices} GPUs are asked for, {len(usable)} are there",
            "--devices cpu tries it with CPU ranks",
            "--worlds",
        )
        return LayoutPlan(layout, config, refusal=refusal)
    else:
        use = ",".join(str(device.index) for device in usable[: layout.num_devices])
    plain, options = _without_options(config)
    try:
        return _plan_with(config, machine, facts, layout, schedule, use=use)
    except UserError as error:
        refusal = error
    if not options:
        return LayoutPlan(layout, config, refusal=refusal)
    try:
        planned = _plan_with(plain, machine, facts, layout, schedule, use=use)
    except UserError as error:
        return LayoutPlan(layout, config, refusal=error)
    return replace(planned, without=tuple(f"{name}: {refusal.cause}" for name in options))


def _without_options(config: Config) -> tuple[Config, list[str]]:
    """The config without the options that only some strategies have, and the keys of these."""
    off = {
        name: value
        for name, value in _STRATEGY_OPTIONS.items()
        if getattr(config.devices, name) != value
    }
    rows = [row for row in config.named_features if row.load().of_some_strategies]
    keys = [*(f"devices.{name}" for name in off), *(key for row in rows for key in row.keys)]
    plain = config.without_features(lambda feature: feature.of_some_strategies)
    return plain.with_values(devices=off), keys


def _plan_with(
    config: Config,
    machine: Machine,
    facts: Facts,
    layout: Layout,
    schedule: ProfileSchedule,
    *,
    use: str,
) -> LayoutPlan:
    """Plan a layout. use: its devices. UserError: the layout is not possible."""
    # nothing is evaluated here, so the plan has no note about evaluation
    config = config.with_values(
        train={"eval_every": 0}, devices={"strategy": layout.strategy, "use": use}
    )
    facts = measure_speeds(config, machine, facts)
    return LayoutPlan(layout, config, plan_profile(config, machine, facts, schedule))


def describe_bench(
    loaded: LoadedConfig,
    machine: Machine,
    facts: Facts,
    layout_plans: Sequence[LayoutPlan],
    schedule: ProfileSchedule,
) -> Bench:
    """Describe the benchmark. UserError: no layout is possible."""
    plans = tuple(each.plan for each in layout_plans if each.plan)
    if not plans:
        for each in layout_plans:
            if each.refusal:
                raise each.refusal
    return Bench(
        name=loaded.name,
        config=loaded.config,
        schedule=schedule,
        plans=plans,
        cores=machine.cores,
        load=psutil.getloadavg()[0],
        formulas=facts.formulas,
        environment=surroundings(loaded.config.engine, machine),
        time=time.time(),
    )


def measure_layouts(
    layout_plans: Sequence[LayoutPlan],
    schedule: ProfileSchedule,
    ranks: Pool | None = None,
    job: Callable[..., Any] = watch_rank,
) -> Iterator[Row]:
    """Measure the layouts, and give one row after the other.

    ranks: processes to use in place of new ones; for tests
    job: the work of a rank; tests replace it to simulate faults
    """
    base = None
    with scratch("bench") as home:
        for number, layout_plan in enumerate(layout_plans):
            result = measure_layout(layout_plan, schedule, home / str(number), ranks=ranks, job=job)
            base = base or result.profile
            yield row_of(result, base)


def measure_layout(
    layout_plan: LayoutPlan,
    schedule: ProfileSchedule,
    home: Path,
    *,
    ranks: Pool | None = None,
    job: Callable[..., Any] = watch_rank,
) -> LayoutResult:
    """Measure one layout's steps in processes of its own. ranks, job: as in measure_layouts().

    home: a directory to create; its `run` has the journal of the steps
    """
    plan = layout_plan.plan
    if plan is None:
        return LayoutResult(layout_plan)
    home.mkdir()
    libraries = entry_of(layout_plan.config.task).libraries
    fresh = pool(plan.layout.world_size, home / "ranks.log", _PATIENCE, libraries=libraries)
    try:
        with nullcontext(ranks) if ranks else fresh as warm:
            profile = run_profile(
                layout_plan.config, plan, schedule, ranks=warm, home=home, job=job
            )
    except SamecurveError as error:
        return LayoutResult(layout_plan, failure=error)
    return LayoutResult(layout_plan, profile)
