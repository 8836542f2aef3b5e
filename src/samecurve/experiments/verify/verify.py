"""`samecurve verify`: does the number of devices change the result?

Each layout trains the same few steps of the user's own model and data, and is compared with one
device.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.feature_list import spec_of
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.same_bits import why_not_sharded
from samecurve.core.system.installation import install_command
from samecurve.errors import UserError
from samecurve.experiments.layout_runner import LayoutRunner, on_one_device, with_bits_settled
from samecurve.experiments.layouts import Layout, default_bits, default_layouts, parse_layout
from samecurve.experiments.scratch import scratch
from samecurve.experiments.verify.rounding import Rounding, measure_rounding, rounding_line
from samecurve.experiments.verify.verdicts import TOLERANCE, Verdict, compare_layouts
from samecurve.experiments.verify.verify_report import as_json as report_json
from samecurve.experiments.verify.verify_report import columns, conclusion, head, row
from samecurve.features.balance import balance_of
from samecurve.launch.pool import JobFailedError, Pool, pool
from samecurve.probe import probe
from samecurve.run.describe import describe, missing_libraries
from samecurve.tasks import entry_of
from samecurve.terminal import echo

_CPU_RANKS = 3  # world sizes 2 and 3
_PATIENCE = 1800.0  # seconds for one layout


def verify(
    loaded: LoadedConfig,
    layout_list: str | None,
    *,
    steps: int | None,
    as_json: bool,
    show: Callable[[str], None],
    rounding: tuple[Config, int] | None = None,
) -> int:
    """Compare layouts and show each verdict; return the exit code: 0 only if every layout passes.

    layout_list: the value of --layouts; None: all layouts that this machine can run
    steps: optimizer steps of each layout; None: 6, or all steps of a shorter run
    as_json: print the verdicts as JSON at the end
    rounding: the config in its own precision, and the steps within which to measure how fast the
        model carries rounding on; None: that is not measured
    show: prints lines of the table
    """
    config, machine = loaded.config, probe()
    tolerance = _tolerance(config)
    facts = describe(config)
    has_gpus = len(machine.devices) > 1 and not config.devices.use.startswith("cpu")
    kind = "cuda" if has_gpus else "cpu"
    parts = [] if layout_list is None else layout_list.split(",")
    named = [parse_layout(part) for part in parts]
    config = _with_bits_settled(config, machine, facts, kind, named)
    tolerance = 0.0 if config.train.asks_same_bits else tolerance
    layouts = named or _default_layouts(config, facts, kind, machine)
    for engine in {leg.engine for layout in layouts for leg in layout.legs} - {config.engine}:
        # refuses an engine for which the task has no model
        describe(config.with_values(engine=engine))
    left_out = [] if layout_list is not None else _left_out_layouts(config, facts, kind, machine)
    left_out += _left_out_settings(config)
    ranks_needed = max(layout.max_processes for layout in layouts)
    libraries = entry_of(config.task).libraries
    with (
        scratch("verify") as home,
        pool(ranks_needed, home / "ranks.log", _PATIENCE, libraries=libraries) as ranks,
    ):
        runner = LayoutRunner(config, machine, facts, steps=steps, kind=kind, pool=ranks, home=home)
        verdicts = _shown(runner, layouts, tolerance, show)
        carried = None
        if rounding:
            carried = _measured(rounding, machine, kind=kind, ranks=ranks, home=home / "own")
            show(rounding_line(carried))
    if as_json:
        echo(report_json(runner, tolerance, verdicts, left_out, carried))
    lines = [f"left out: {line}" for line in left_out]
    show("\n".join([*lines, conclusion(verdicts, bits=runner.same_bits)]))
    return 0 if all(verdict.verdict == "PASS" for verdict in verdicts) else 1


def _shown(
    runner: LayoutRunner, layouts: Sequence[Layout], tolerance: float, show: Callable[[str], None]
) -> list[Verdict]:
    """Train the layouts, and show each verdict as soon as it is there."""
    verdicts: list[Verdict] = []
    columns_of_table = columns(layouts, bits=runner.same_bits)
    for verdict in compare_layouts(runner, layouts, tolerance):
        if not verdicts:
            show(head(runner, layouts, tolerance))
        show(row(verdict, columns_of_table, bits=runner.same_bits))
        verdicts.append(verdict)
    return verdicts


def _with_bits_settled(
    config: Config, machine: Machine, facts: Facts, kind: str, named: Sequence[Layout]
) -> Config:
    """The config with what the plan of one device chooses where the config leaves the bits
    to it; bits may follow the devices where one of the named layouts lets them.
    """
    if not config.train.plan_chooses_bits:
        return config
    legs = [leg for layout in named for leg in layout.legs]
    if any(leg.accumulation_steps or "tree" not in leg.spec.reducers for leg in legs):
        return config.with_bits(same=False)
    alone = on_one_device(config, kind)
    settled = with_bits_settled(alone, machine, facts)
    if settled.train.asks_same_bits:
        config = config.with_values(batch={"per_device": settled.batch.per_device})
    return config.with_bits(same=settled.train.asks_same_bits)


def _measured(
    rounding: tuple[Config, int], machine: Machine, *, kind: str, ranks: Pool, home: Path
) -> Rounding:
    """UserError: too few steps, or the plan on one device is refused. rounding: as in verify()"""
    config, steps = rounding
    facts = describe(config)
    runner = LayoutRunner(config, machine, facts, steps=None, kind=kind, pool=ranks, home=home)
    try:
        return measure_rounding(runner, steps)
    except JobFailedError as error:
        raise error.refusal or error from None


def _tolerance(config: Config) -> float:
    if config.train.asks_same_bits:
        return 0.0
    tolerance = TOLERANCE.get(config.train.precision)
    if tolerance is None:
        raise UserError(
            "verify compares in f64 or f32; the rounding of"
            f" {config.train.precision} would hide the differences that it looks for",
            "--dtype f64, or leave --dtype out; --bits compares any to the last bit",
            "--dtype",
        )
    spec = spec_of(config.optimizer.name)
    if spec and spec.why_f64 and config.train.precision != "f64":
        raise UserError(
            f"verify compares {spec.name} in f64: {spec.why_f64}",
            "--dtype f64, or leave --dtype out; --bits compares any to the last bit",
            "--dtype",
        )
    return tolerance


def _default_layouts(config: Config, facts: Facts, kind: str, machine: Machine) -> list[Layout]:
    """All layouts that this machine and this config can run."""
    unfit = machine.unfit if kind == "cuda" else {}
    engines = [
        engine
        for engine in entry_of(config.task).engines(config)
        if not missing_libraries(engine) and (engine == config.engine or engine not in unfit)
    ]
    num_devices = _CPU_RANKS if kind == "cpu" else len(machine.devices)
    if config.train.asks_same_bits:
        layouts = default_bits(num_devices, engines)
    else:
        layouts = default_layouts(num_devices, engines, accumulates=not facts.coupled)
    if not _why_not_sharded(config, facts):
        return layouts
    return [layout for layout in layouts if all(leg.spec.sharding == "none" for leg in layout.legs)]


def _why_not_sharded(config: Config, facts: Facts) -> str:
    """Why the optimizer can't update shards; empty: it can."""
    if facts.updates.user_optimizer and not facts.updates.user_optimizer.elementwise:
        return f"{facts.updates.user_optimizer.by} is not said to be elementwise"
    return why_not_sharded(config.optimizer, facts) if config.train.asks_same_bits else ""


def _left_out_layouts(config: Config, facts: Facts, kind: str, machine: Machine) -> list[str]:
    """Why layouts that another config or machine would have are not among the default ones."""
    lines = []
    if facts.coupled:
        lines.append("layouts with accumulation: the model mixes the samples of a microbatch")
    for engine in entry_of(config.task).engines(config):
        missing = ", ".join(missing_libraries(engine))
        if missing:
            lines.append(f"engine {engine}: {missing} not installed ({install_command(engine)})")
        elif kind == "cuda" and engine != config.engine and engine in machine.unfit:
            unfit = machine.unfit[engine]
            lines.append(f"engine {engine}: {unfit.cause} ({unfit.remedy})")
    if kind == "cpu" and machine.devices:
        lines.append("the GPU: several layouts need several of them; these ran on CPU ranks")
    if why := _why_not_sharded(config, facts):
        lines.append(f"fsdp: {why}")
    return lines


def _left_out_settings(config: Config) -> list[str]:
    """Settings of the config that some layouts do not have."""
    lines, devices = [], config.devices
    balance = balance_of(config)
    if isinstance(balance, tuple):
        speeds = " to ".join(f"{speed:g}" for speed in balance)
        lines.append(
            f"balance {speeds}: obeyed where dp or ddp has {len(balance)} devices; other layouts"
            " assign evenly"
        )
    elif balance != "even":
        lines.append(
            f"balance {balance}: layouts assign evenly; a list of speeds is obeyed where dp or ddp"
            " has as many devices"
        )
    for feature in config.named_features:
        if feature.load().follows_devices:
            words = ", ".join(f"{key} {getattr(devices, key)}" for key in feature.defaults)
            lines.append(f"{words}: it changes results, and is off here")
    return lines
