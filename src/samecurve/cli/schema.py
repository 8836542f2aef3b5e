"""`samecurve schema`."""

import click

from samecurve.cli.completion import task_names, words
from samecurve.cli.options import Verb
from samecurve.terminal import echo


@click.command(cls=Verb, help_group="Data and configs")
@click.option(
    "--task",
    type=str,
    metavar="TASK",
    shell_complete=words(task_names, files=True),
    help="of this task alone: a name, or path/to/file.py:Class with sections of its own",
)
@click.option("--table", is_flag=True, help="as a table of keys, defaults and meanings (Markdown)")
def schema(*, task: str | None, table: bool) -> None:
    """The JSON Schema of the config, for editors."""
    import json

    from samecurve.core.config.json_schema import as_table, json_schema
    from samecurve.tasks import Tasks

    tasks = Tasks(only=task)
    if table:
        echo(as_table(tasks))
    else:
        echo(json.dumps(json_schema(tasks), indent=1))
