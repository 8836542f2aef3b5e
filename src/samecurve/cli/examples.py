"""`samecurve examples`."""

import shlex
from pathlib import Path

import click

from samecurve.cli.options import Verb
from samecurve.terminal import echo


@click.command(cls=Verb, help_group="Begin")
@click.argument("directory", type=Path, metavar="[DIR]", default=Path())
def examples(*, directory: Path) -> None:
    """Write example configs and tasks into DIR or this directory.

    They are in models/ and examples/. No file is overwritten. docs/config.schema.json, which the
    configs name for editors, is written, too.
    """
    from samecurve.core.system.shipped import DIRECTORIES, SCHEMA, write_shipped
    from samecurve.units import counted

    written = write_shipped(directory)
    places = [*(f"{directory / name}/" for name in DIRECTORIES), str(directory / SCHEMA)]
    if written:
        echo(f"wrote  {counted(written, 'file')}: {', '.join(places)}")
    else:
        echo(f"kept   {', '.join(places)}: here already, as they came with this version")
    steps = ["samecurve train -f models/tiny.yaml"]
    if directory != Path():
        steps.insert(0, f"cd {shlex.quote(str(directory))}")
    echo(f"next   {' && '.join(steps)}")
