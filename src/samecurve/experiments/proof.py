"""`samecurve verify`: what to try on this machine, the table, the exit code."""

import click

from samecurve.core.config.sections import Config, LoadedConfig
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.errors import UserError
from samecurve.experiments.layouts import Layout, default_bits, default_layouts, parse_layout
from samecurve.experiments.scratch import scratch
from samecurve.experiments.verify import TOLERANCE, Trials, Verdict, as_json, verify
from samecurve.launch.pool import pool
from samecurve.probe import probe
from samecurve.run.describe import describe, missing
from samecurve.system import install_command
from samecurve.tasks import engines_of
from samecurve.units import show_seconds

_CPU_RANKS = 3  # worlds 2 and an odd one
_PATIENCE = 1800.0  # seconds for one layout


def prove(loaded: LoadedConfig, wanted: str | None, steps: int | None, json: bool) -> int:
    """Prints as it goes; returns the exit code: 0 only if every layout passes."""
    config, machine = loaded.config, probe()
    bits = config.train.exact
    tolerance = 0.0 if bits else TOLERANCE.get(config.train.precision)
    if tolerance is None:
        raise UserError(
            f"verify compares in f64 or f32; {config.train.precision} rounds away what it"
            " looks for",
            "--dtype f64, or leave --dtype out; --bits compares any to the last bit",
            "--dtype",
        )
    facts = describe(config)
    on = _where(config, machine)
    engines = [engine for engine in engines_of(config) if not missing(engine)]
    there = _CPU_RANKS if on == "cpu" else len(machine.devices)
    layouts = (
        [parse_layout(part) for part in wanted.split(",")]
        if wanted is not None
        else (
            default_bits(there, engines)
            if bits
            else default_layouts(there, not facts.coupled, engines)
        )
    )
    for engine in {leg.engine for layout in layouts for leg in layout.legs} - {config.engine}:
        describe(
            config.model_copy(update={"engine": engine})
        )  # refuses what this task has no model for
    left_out = _left_out(config, facts, on, machine) if wanted is None else []
    if wanted is None and facts.user_optimizer and not facts.user_optimizer.elementwise:
        layouts = [
            layout for layout in layouts if not any("fsdp" in leg.strategy for leg in layout.legs)
        ]
        left_out.append(f"fsdp: {facts.user_optimizer.by} is not said to be elementwise")
    balance = config.devices.balance
    if balance != "even":
        left_out.append(
            f"balance {balance}: layouts deal evenly; a list of speeds is obeyed where dp or ddp"
            " has as many devices"
            if isinstance(balance, str)
            else (
                f"balance {' to '.join(f'{speed:g}' for speed in balance)}: obeyed where dp or ddp"
                f" has {len(balance)} devices; other layouts deal evenly"
            )
        )
    if config.devices.compress != "none":
        left_out.append(f"compress {config.devices.compress}: it changes results, and is off here")
    with (
        scratch("verify") as home,
        pool(max(layout.most for layout in layouts), home / "ranks.log", _PATIENCE) as ranks,
    ):
        trials = Trials(config, machine, facts, steps, on, ranks, home)
        found: list[Verdict] = []
        for verdict in verify(trials, layouts, tolerance):
            if not json:
                click.echo(
                    "\n".join(
                        [
                            *(_head(trials, config, on, tolerance, layouts) if not found else []),
                            _row(verdict, _width(layouts), bits),
                        ]
                    )
                )
            found.append(verdict)
    failed = [verdict for verdict in found if verdict.verdict != "PASS"]
    if json:
        click.echo(as_json(trials, config, tolerance, found, left_out))
    else:
        click.echo(
            "\n".join([*(f"left out: {line}" for line in left_out), _last(found, failed, bits)])
        )
    return 1 if failed else 0


def _where(config: Config, machine: Machine) -> str:
    """cuda where several GPUs may be used, else cpu: layouts are compared on one kind of device."""
    return (
        "cuda" if len(machine.devices) > 1 and not config.devices.use.startswith("cpu") else "cpu"
    )


def _left_out(config: Config, facts: Facts, on: str, machine: Machine) -> list[str]:
    lines = []
    if facts.coupled:
        lines.append("layouts with accumulation: the model mixes the samples of a round")
    lines += [
        f"engine {engine}: {', '.join(missing(engine))} not installed ({install_command(engine)})"
        for engine in engines_of(config)
        if missing(engine)
    ]
    if on == "cpu" and machine.devices:
        lines.append("the GPU: several layouts need several of them; these ran on CPU ranks")
    return lines


def _head(
    trials: Trials, config: Config, on: str, tolerance: float, layouts: list[Layout]
) -> list[str]:
    width = _width(layouts)
    what = (
        f"verify {trials.steps} steps of {trials.batch} samples in {config.train.precision} on"
        f" {'the CPU' if on == 'cpu' else 'GPUs'}"
    )
    if trials.exact:
        return [
            (
                f"{what}; losses, norms, parameters and optimizer state, bit for bit against one"
                " device"
            ),
            f"       {'layout':<{width}} hash of the last state   first step  verdict",
        ]
    return [
        f"{what}, dropout off; largest relative difference to one device, tolerance {tolerance:g}",
        (
            f"       {'layout':<{width}} {'loss':>9} {'grad norm':>10} {'parameters':>11}   first"
            " step  verdict"
        ),
    ]


def _width(layouts: list[Layout]) -> int:
    return max(18, *(len(str(layout)) for layout in layouts))


def _row(verdict: Verdict, width: int, bits: bool) -> str:
    first = "-" if verdict.first_step is None else str(verdict.first_step)
    figures = (
        f"{verdict.hash[:16]:<22}"
        if bits
        else f"{verdict.loss:>9.1e} {verdict.grad_norm:>10.1e} {verdict.parameters:>11.1e}"
    )
    lines = [
        f"       {verdict.layout:<{width}} {figures}   {first:>10}  {verdict.verdict}  "
        f" ({show_seconds(verdict.seconds)})"
    ]
    return "\n".join([*lines, *([f"         {verdict.culprit}"] if verdict.culprit else [])])


def _last(found: list[Verdict], failed: list[Verdict], bits: bool) -> str:
    if failed:
        return (
            f"FAIL   {len(failed)} of {len(found)} layouts differ from one device:"
            f" {', '.join(verdict.layout for verdict in failed)}"
        )
    if bits:
        return f"PASS   all {len(found)} layouts give the bits of one device"
    return (
        f"PASS   all {len(found)} layouts give one device's result; largest difference"
        f" {max(verdict.worst for verdict in found):.1e}"
    )
