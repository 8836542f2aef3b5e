"""`samecurve verify`."""

import sys
from typing import Any

import click

from samecurve.cli.load_config import load_config
from samecurve.cli.options import ConfigVerb
from samecurve.terminal import echo


@click.command(cls=ConfigVerb, help_group="Train")
@click.option(
    "--layouts",
    metavar="LIST",
    help=(
        "such as ddp:2,fsdp:3,ddp:2/4 (accumulation steps),ddp:2..fsdp:3 (saved, resumed); all"
        " that this machine can do if not given"
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
@click.option(
    "--rounding",
    type=click.IntRange(min=2),
    is_flag=False,
    flag_value=200,
    metavar="[STEPS]",
    help=(
        "after how many steps the last digit of one weight has changed the loss by 0.001, in the"
        " config's own precision; within 200 steps if not given"
    ),
)
@click.option("--json", "as_json", is_flag=True, help="the verdicts as JSON")
@click.option("--headless", is_flag=True, hidden=True, help="as --json, the table on stderr")
def verify(
    *,
    layouts: str | None,
    steps: int | None,
    bits: bool,
    rounding: int | None,
    as_json: bool,
    headless: bool,
    **flags: Any,
) -> None:
    """Does the number of devices change the result?

    A few steps in each layout, against one device.
    """
    from samecurve.experiments.verify.verify import verify as verify_config

    own_flags = dict(flags)
    if bits or flags["exact"]:
        flags["exact"] = True
    else:
        flags["dtype"] = flags["dtype"] or "f64"
    loaded = load_config(flags, say=not as_json and not headless)
    measure = None
    if rounding:
        own_flags["exact"] = flags["exact"]
        measure = load_config(own_flags, say=False, loud=False).config, rounding
    has_table = headless or not as_json

    def show(line: str) -> None:
        if has_table:
            echo(line, err=headless)

    as_json = as_json or headless
    sys.exit(
        verify_config(loaded, layouts, steps=steps, rounding=measure, as_json=as_json, show=show)
    )
