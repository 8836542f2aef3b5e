"""`samecurve convert`."""

import shlex
from pathlib import Path

import click

from samecurve.cli.options import PATH, Verb
from samecurve.terminal import echo


@click.command(cls=Verb)
@click.argument("old", type=PATH)
@click.option(
    "--to",
    "new",
    type=PATH,
    required=True,
    metavar="NEW.yaml",
    help="the file to write; one that exists is refused",
)
def convert(old: Path, new: Path) -> None:
    """Another tool's config (OLD) as one of Samecurve's.

    YAML of axolotl, LLaMA-Factory, Oxidizr and ai-toolkit, JSON of OneTrainer and SimpleTuner, TOML
    of kohya's sd-scripts.
    """
    from samecurve.errors import InvalidConfigError
    from samecurve.run.convert import convert as write_converted

    converted, errors = write_converted(old, new)
    echo("\n".join(converted.summary_lines()))
    if errors:
        echo(f"wrote  {new}, which is refused until what follows is settled")
        raise InvalidConfigError(errors)
    command = f"samecurve train -f {shlex.quote(str(new))}"
    if converted.run_directory:
        command += f" --save-dir {shlex.quote(converted.run_directory)}"
    echo(f"wrote  {new}; {command}")
