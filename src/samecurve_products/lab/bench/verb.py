"""`samecurve bench`."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from samecurve.seam import PATH, ConfigVerb, echo, load_config


@click.command(cls=ConfigVerb, help_group="Measure")
@click.option(
    "--worlds",
    metavar="1,2,4",
    help=(
        "numbers of devices; 1, 2, 4, ... and all that there are if not given (at most 8 CPU ranks)"
    ),
)
@click.option(
    "--strategies",
    metavar="ddp,dp",
    help=(
        "what to try on several devices; the config's own, or ddp,dp,fsdp (engine jax: dp,fsdp) if"
        " not given"
    ),
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="optimizer steps that are timed, in each layout",
)
@click.option(
    "--warm",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="steps before them that are thrown away",
)
@click.option(
    "--collectives",
    is_flag=True,
    help=(
        "without a config: all-reduce, all-gather, reduce-scatter from 4 KiB up, their latency and"
        " bandwidth"
    ),
)
@click.option(
    "--suite",
    type=click.Choice(["nvidia", "amd", "cpu"]),
    help="without a config: every strategy for every model of the suite, a JSON file for each",
)
@click.option(
    "--to",
    type=PATH,
    metavar="DIR",
    help=(
        "where bench.json and bench.html go; bench/NAME-TIME if not given; of a suite"
        " bench/suite-NAME, where it goes on if it was cut off"
    ),
)
@click.option(
    "--png", is_flag=True, help="also bench.png, the charts as one picture (needs matplotlib)"
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="the measurements as JSON on stdout, and no files unless --to asks for them",
)
def bench(
    *,
    worlds: str | None,
    strategies: str | None,
    steps: int,
    warm: int,
    collectives: bool,
    suite: str | None,
    to: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Speed and memory, by number of devices and strategy.

    Throughput, speed-up and efficiency, too. Trains a few steps of each in throw-away processes.
    """
    from samecurve.seam import alone

    picture = flags.pop("png")

    alone("bench")
    if suite:
        sys.exit(_bench_suite(suite, worlds, strategies, to, as_json=as_json, flags=flags))
    if collectives:
        _check_collectives_flags(click.get_current_context())
        from samecurve_products.lab.bench.bench_collectives import bench_collectives

        # a config needs a batch; collectives have none
        config = load_config({**flags, "global_batch": 1}, say=not as_json, trains=False).config
        sys.exit(bench_collectives(config, worlds=worlds, to=to, as_json=as_json))
    from samecurve.core.measurement.profile_types import ProfileSchedule
    from samecurve_products.lab.bench.bench import bench as bench_config

    if flags["warmup"] is not None:
        echo(
            f"note   --warmup {flags['warmup']} is the learning rate's; --warm N are the steps that"
            " are thrown away",
            err=True,
        )
    loaded = load_config(flags, say=not as_json)
    code = bench_config(
        loaded,
        ProfileSchedule(warm=warm, timed=steps, traced=0),
        worlds=worlds,
        strategies=strategies,
        to=to,
        as_json=as_json,
        picture=picture,
    )
    sys.exit(code)


def _bench_suite(
    name: str,
    worlds: str | None,
    strategies: str | None,
    to: Path | None,
    *,
    as_json: bool,
    flags: dict[str, Any],
) -> int:
    """Measure a suite of models. Returns the exit code."""
    from samecurve.probe import find_gpus
    from samecurve.seam import probe
    from samecurve_products.lab.bench.suite import (
        SUITES,
        SuiteRun,
        default_home,
        run_suite,
        schedule_of,
    )

    context = click.get_current_context()
    _check_suite_flags(context)
    suite = SUITES[name]
    suite.check_vendor(find_gpus(os.environ).vendor)
    if not any(flags[flag] for flag in ("devices", "gpus", "num_gpus")):
        flags["devices"] = suite.devices
    configs = [load_config({**flags, "file": file}, say=not as_json) for file in suite.files()]
    steps = {flag: context.params[flag] for flag in ("warm", "steps") if _is_typed(context, flag)}
    run = SuiteRun(
        name=name,
        schedule=schedule_of(suite, steps.get("warm"), steps.get("steps")),
        machine=probe(),
        home=to or default_home(suite),
        worlds=worlds,
        strategies=strategies,
    )
    return run_suite(run, configs, as_json=as_json)


def _check_suite_flags(context: click.Context) -> None:
    """Refuse flags that contradict the suite."""
    contradicting = {
        "file": "has models of its own",
        "collectives": "trains models",
        "png": "writes no pictures",
    }
    for parameter, what in contradicting.items():
        if _is_typed(context, parameter):
            name = next(each.opts[0] for each in context.command.params if each.name == parameter)
            raise click.UsageError(f"--suite {what}: leave out {name}, or --suite")


def _is_typed(context: click.Context, parameter: str) -> bool:
    return context.get_parameter_source(parameter) == click.core.ParameterSource.COMMANDLINE


_COLLECTIVES_PARAMETERS = {
    "collectives",
    "worlds",
    "to",
    "as_json",
    "devices",
    "gpus",
    "num_gpus",
    "sync_backend",
}


def _check_collectives_flags(context: click.Context) -> None:
    """Refuse flags that mean nothing where only collectives are measured."""
    for parameter in context.command.params:
        if (
            _is_typed(context, str(parameter.name))
            and parameter.name not in _COLLECTIVES_PARAMETERS
        ):
            raise click.UsageError(
                f"--collectives trains nothing, so {parameter.opts[0]} says nothing to it; it takes"
                " --devices, --gpus, --sync-backend, --worlds, --to, --json"
            )
