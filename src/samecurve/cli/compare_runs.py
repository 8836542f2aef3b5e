"""`samecurve compare-runs`."""

import json
import sys
from pathlib import Path

import click

from samecurve.cli.options import Verb
from samecurve.terminal import echo


@click.command("compare-runs", cls=Verb)
@click.argument("first", type=Path, metavar="RUN")
@click.argument("second", type=Path, metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def compare_runs(first: Path, second: Path, *, as_json: bool) -> None:
    """Equal to the last bit, or the first step and array that differ. Exit code 1 if they do."""
    from samecurve.run.compare_runs import compare, describe_comparison

    comparison = compare(first, second)
    if as_json:
        echo(json.dumps(comparison.to_json(), indent=1))
    else:
        echo("\n".join(describe_comparison(comparison, first, second)))
    sys.exit(0 if comparison.equal else 1)
