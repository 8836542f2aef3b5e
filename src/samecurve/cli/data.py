"""`samecurve data`."""

import shlex
from pathlib import Path

import click

from samecurve.cli.options import Verb
from samecurve.terminal import echo


@click.command(cls=Verb)
@click.argument("name", type=click.Choice(["har"]))
@click.option(
    "--synthetic",
    "directory",
    type=Path,
    required=True,
    metavar="DIR",
    help="a new directory, in which a synthetic set is written in the data set's own layout",
)
def data(*, name: str, directory: Path) -> None:
    """Make a data set: har, of walking and resting people, for task timeseries."""
    from samecurve.tasks.timeseries.synthetic import write_set

    del name  # there is one
    lines = write_set(directory)
    echo("\n".join(lines))
    echo(f"wrote  {directory}; samecurve train -f models/har.yaml -d {shlex.quote(str(directory))}")
