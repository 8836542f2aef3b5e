"""`samecurve profile`."""

import sys
from pathlib import Path
from typing import Any

import click

from samecurve.cli.load_config import load_config, measure_before
from samecurve.cli.options import PATH, ConfigVerb


@click.command(cls=ConfigVerb, help_group="Measure")
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
    type=PATH,
    metavar="PATH",
    help=(
        "write a Chrome trace: the first rank's into PATH.json or PATH.json.gz, or every rank's"
        " into a directory"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def profile(*, steps: int, top: int, trace: Path | None, as_json: bool, **flags: Any) -> None:
    """Where the time and memory of a step go.

    Trains a few steps in throw-away processes; leaves nothing but a trace that was asked for.
    """
    from samecurve.worker import alone

    alone("profile")
    from samecurve.experiments.profile.profile import profile as profile_config

    loaded = load_config(flags, say=not as_json)
    code = profile_config(
        loaded,
        steps=steps,
        top=top,
        trace=trace,
        as_json=as_json,
        measure=measure_before(),
    )
    sys.exit(code)
