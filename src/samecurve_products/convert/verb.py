"""`samecurve convert`."""

import shlex
from pathlib import Path
from typing import Any

import click

from samecurve.cli.options import CONFIG_OPTIONS
from samecurve.seam import PATH, Verb, echo

_FLAGS = [option for option in CONFIG_OPTIONS if option.name != "file"]


@click.command(cls=Verb, help_group="Data and configs", params=_FLAGS)
@click.argument("old", type=PATH)
@click.option(
    "--to",
    "new",
    type=PATH,
    required=True,
    metavar="NEW.yaml",
    help="the file to write; one that exists is refused",
)
def convert(old: Path, new: Path, **flags: Any) -> None:
    """Another tool's config (OLD) as one of Samecurve's.

    YAML of axolotl, LLaMA-Factory, Oxidizr and ai-toolkit, JSON of OneTrainer and SimpleTuner, TOML
    of kohya's sd-scripts. What a flag sets is written in place of what OLD says.
    """
    from samecurve.cli.load_config import set_flags
    from samecurve.seam import InvalidConfigError
    from samecurve_products.convert.write_converted import convert as write_converted

    notes: list[str] = []
    of_config = {**flags, "file": old}
    converted, errors = write_converted(
        old, new, lambda document: notes.extend(set_flags(document, of_config))
    )
    echo("\n".join([*converted.summary_lines(), *(f"note   {note}" for note in notes)]))
    if errors:
        echo(f"wrote  {new}, which is incomplete: the errors below say what it lacks")
        raise InvalidConfigError(errors)
    command = f"samecurve train -f {shlex.quote(str(new))}"
    if converted.run_directory:
        command += f" --save-dir {shlex.quote(converted.run_directory)}"
    echo(f"wrote  {new}; {command}")
