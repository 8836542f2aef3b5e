"""`samecurve run`."""

import sys
from pathlib import Path
from typing import Any

import click

from samecurve.cli.options import exit_on_sigterm


@click.command(
    context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] [-m]"
)
@click.option(
    "--gpus",
    metavar="0,1",
    help="one rank on each of these, as CUDA_VISIBLE_DEVICES leaves them; all if not given",
)
@click.option(
    "--nproc",
    type=int,
    metavar="N",
    help="so many ranks: on the first N GPUs, or on the CPU where there is none",
)
@click.option(
    "--output",
    type=click.Choice(["all", "first", "files"]),
    default="all",
    show_default=True,
    help="on the screen: every rank's lines, the first rank as it is, or none",
)
@click.option(
    "--log-dir",
    type=Path,
    metavar="DIR",
    help="rank-N.log of every rank; runs/SCRIPT-TIME/logs if not given",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="start all ranks anew so often after a failure; the script resumes by itself",
)
@click.option(
    "--hang-floor",
    type=click.IntRange(min=0),
    default=600,
    show_default=True,
    metavar="S",
    help=(
        "seconds in which a rank enters no collective that are never taken for a hang; 0: not"
        " watched"
    ),
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as for python -m")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Any script that torchrun starts, on all devices of this machine.

    What follows SCRIPT is the script's.
    """
    exit_on_sigterm()
    from samecurve.launch.script.attempt import Request
    from samecurve.launch.script.run import run as run_script

    sys.exit(run_script(Request(script, arguments, **options)))
