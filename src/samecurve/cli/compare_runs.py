"""`samecurve compare-runs`."""

import sys
from pathlib import Path

import click

from samecurve.cli.options import Verb


@click.command("compare-runs", cls=Verb)
@click.argument("first", type=Path, metavar="RUN")
@click.argument("second", type=Path, metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def compare_runs(first: Path, second: Path, *, as_json: bool) -> None:
    """Equal to the last bit, or the first step and array that differ. Exit code 1 if they do."""
    from samecurve.experiments.compare import compare_runs as compare

    sys.exit(compare(first, second, as_json=as_json))
