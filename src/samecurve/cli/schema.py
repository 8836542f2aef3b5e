"""`samecurve schema`."""

import click

from samecurve.cli.options import Verb


@click.command(cls=Verb)
@click.option("--table", is_flag=True, help="as a table of keys, defaults and meanings (Markdown)")
def schema(*, table: bool) -> None:
    """The JSON Schema of the config, for editors."""
    import json

    from samecurve.core.config.json_schema import as_table, json_schema
    from samecurve.tasks import Tasks

    if table:
        click.echo(as_table(Tasks()))
    else:
        click.echo(json.dumps(json_schema(Tasks()), indent=1))
