"""The verbs that try a config before it trains for good: plan, verify, profile, bench.

As in cli.py: parse, call one function, print one thing.
"""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import Verb, config_options, load_config, terminated

if TYPE_CHECKING:
    from samecurve.core.config.sections import Loaded
    from samecurve.core.planning.facts import Facts, Measure
    from samecurve.experiments.machine import Asked

probe = click.option(
    "--probe-batch",
    is_flag=True,
    help="first try, in throw-away processes, how many samples at once fit, and plan from that",
)

init_from = click.option(
    "--init-from",
    type=Path,
    metavar="PATH",
    help=(
        "begin with these weights, without state: a run, a checkpoint, safetensors, a .pt; the same"
        " command goes on with the run"
    ),
)


def probed(loaded: "Loaded") -> "Facts":
    from samecurve.experiments.measure import probe_batch

    return probe_batch(loaded.config)


def measuring(loaded: "Loaded") -> "Measure | None":
    """What measures the devices, if the config asks for that."""
    if loaded.config.devices.balance != "measured":
        return None
    from samecurve.experiments.balance import measured

    return measured


@click.command(cls=Verb)
@config_options
@click.option("--json", "as_json", is_flag=True, help="the plan as JSON")
@click.option(
    "--machine",
    metavar="WORDS|FILE",
    help=(
        "on a machine that this is not: 8xH100, 4x8xH200 (hosts x devices), a JSON file; with"
        " predicted times"
    ),
)
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    help="--machine: share of a device's peak while it computes; 0.4 is assumed if not given",
)
@click.option(
    "--from",
    "bench",
    type=Path,
    metavar="BENCH.json",
    help="--machine: the share that `samecurve bench` measured on one device",
)
@click.option(
    "--chart",
    type=Path,
    metavar="FILE.png",
    help="--machine: efficiency over 1 to 1,024 devices, drawn",
)
@init_from
@probe
def plan(
    as_json: bool,
    probe_batch: bool,
    init_from: Path | None,
    machine: str | None,
    mfu: float | None,
    bench: Path | None,
    chart: Path | None,
    **flags: Any,
) -> None:
    """What train would do, and why. Trains nothing."""
    if machine is not None and (probe_batch or init_from):
        raise click.UsageError(
            f"{'--probe-batch tries this machine' if probe_batch else '--init-from looks at weights here'};"
            " --machine plans for another"
        )
    from samecurve.experiments.machine import asked

    wanted = asked(machine, mfu, bench, chart)
    loaded = load_config(flags, say=not as_json)
    if wanted:
        _plan_machine(loaded, as_json, wanted)
        return
    import json

    from samecurve.core.config.sections import flatten
    from samecurve.observe.plan_text import table
    from samecurve.run.init_weights import examine
    from samecurve.run.prepare import make_plan

    made, facts = make_plan(loaded, probed(loaded) if probe_batch else None, measuring(loaded))
    weights = examine(init_from, loaded.config, facts).words if init_from else ()
    if as_json:
        click.echo(
            json.dumps(
                {
                    "plan": made.to_json(),
                    "origins": loaded.origins,
                    "formulas": facts.formulas,
                    **({"weights": weights} if weights else {}),
                },
                indent=1,
            )
        )
    else:
        click.echo(
            "\n".join(
                [
                    *(f"note   {note}" for note in (*loaded.notes, *weights)),
                    table(made, loaded.origins, flatten(loaded.config), facts.formulas),
                ]
            )
        )


def _plan_machine(loaded: "Loaded", as_json: bool, asked: "Asked") -> None:
    """A plan that is refused ends the verb as it would end train, once all that would be served is
    shown.
    """
    import json

    from samecurve.core.config.sections import flatten
    from samecurve.experiments.machine import predict
    from samecurve.observe.plan_text import table

    found = predict(loaded, asked)
    notes = [
        *loaded.notes,
        *(
            ["devices.balance measured: the devices there are alike, and slots are dealt evenly"]
            if loaded.config.devices.balance == "measured"
            else []
        ),
    ]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "plan": found.plan and found.plan.to_json(),
                    "origins": loaded.origins,
                    "formulas": found.facts.formulas,
                    "predicted": found.json(),
                },
                indent=1,
            )
        )
    else:
        click.echo(
            "\n".join(
                [
                    *(f"note   {note}" for note in notes),
                    *(
                        [
                            table(
                                found.plan,
                                loaded.origins,
                                flatten(loaded.config),
                                found.facts.formulas,
                            ),
                            "",
                        ]
                        if found.plan
                        else []
                    ),
                    *found.lines(),
                ]
            )
        )
    if found.refused:
        raise found.refused


@click.command(cls=Verb)
@config_options
@click.option(
    "--layouts",
    metavar="LIST",
    help=(
        "such as ddp:2,fsdp:3,ddp:2/4 (rounds),ddp:2..fsdp:3 (saved, resumed); all that this"
        " machine can do if not given"
    ),
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="optimizer steps of each layout; 6 if not given, or all that the run has",
)
@click.option(
    "--bits", is_flag=True, help="to the last bit: with train.exact, in the config's own precision"
)
@click.option("--json", "as_json", is_flag=True, help="the verdicts as JSON")
def verify(layouts: str | None, steps: int | None, bits: bool, as_json: bool, **flags: Any) -> None:
    """Does the number of devices change the result?

    A few steps in each layout, against one device.
    """
    signal.signal(signal.SIGTERM, terminated)
    from samecurve.experiments.proof import prove

    how = {"exact": True} if bits or flags["exact"] else {"dtype": flags["dtype"] or "f64"}
    sys.exit(prove(load_config({**flags, **how}, say=not as_json), layouts, steps, as_json))


@click.command(cls=Verb)
@config_options
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="optimizer steps that are timed",
)
@click.option(
    "--top",
    type=click.IntRange(1, 400),
    default=10,
    show_default=True,
    help="so many of the costliest operations",
)
@click.option(
    "--trace",
    type=Path,
    metavar="PATH",
    help=(
        "write a Chrome trace: the first rank's into PATH.json or PATH.json.gz, or every rank's"
        " into a directory"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def profile(steps: int, top: int, trace: Path | None, as_json: bool, **flags: Any) -> None:
    """Where the time and memory of a step go.

    Trains a few steps in throw-away processes; leaves nothing but a trace that was asked for.
    """
    signal.signal(signal.SIGTERM, terminated)
    from samecurve.worker.cluster_env import alone

    alone("profile")
    from samecurve.experiments.profile import profile as measured

    loaded = load_config(flags, say=not as_json)
    sys.exit(measured(loaded, steps, top, trace, as_json, measuring(loaded)))


@click.command(cls=Verb)
@config_options
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
    "--to",
    type=Path,
    metavar="DIR",
    help="where bench.json, bench.html and bench.png go; bench/NAME-TIME if not given",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="the figures as JSON on stdout, and no files unless --to asks for them",
)
def bench(
    worlds: str | None,
    strategies: str | None,
    steps: int,
    warm: int,
    collectives: bool,
    to: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Throughput, speed-up, efficiency and memory, by number of devices and strategy.

    Trains a few steps of each in throw-away processes.
    """
    signal.signal(signal.SIGTERM, terminated)
    from samecurve.worker.cluster_env import alone

    alone("bench")
    if collectives:
        _check_collectives(click.get_current_context())
        from samecurve.experiments.collectives import bench_collectives

        sys.exit(
            bench_collectives(
                load_config({**flags, "global_batch": 1}, say=not as_json).config,
                worlds,
                to,
                as_json,
            )
        )
    from samecurve.core.profile_types import ProfileSchedule
    from samecurve.experiments.bench import bench as measured

    if flags["warmup"] is not None:
        click.echo(
            f"note   --warmup {flags['warmup']} is the learning rate's; --warm N are the steps that"
            " are thrown away",
            err=True,
        )
    sys.exit(
        measured(
            load_config(flags, say=not as_json),
            worlds,
            strategies,
            ProfileSchedule(warm, steps, 0),
            to,
            as_json,
        )
    )


def _check_collectives(context: click.Context) -> None:
    """A flag that says nothing to them is refused."""
    taken = {
        "collectives",
        "worlds",
        "to",
        "as_json",
        "devices",
        "gpus",
        "num_gpus",
        "sync_backend",
    }
    for parameter in context.command.params:
        if (
            parameter.name not in taken
            and context.get_parameter_source(str(parameter.name))
            == click.core.ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(
                f"--collectives trains nothing, so {parameter.opts[0]} says nothing to it; it takes"
                " --devices, --gpus, --sync-backend, --worlds, --to, --json"
            )
