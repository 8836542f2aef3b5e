"""`samecurve compare-runs`."""

import json
import sys
from typing import TYPE_CHECKING

import click

from samecurve.cli.options import RUN_PLACE
from samecurve.seam import Verb, at_hand, echo

if TYPE_CHECKING:
    from pathlib import Path

    from samecurve.storage.url import ObjectUrl


@click.command("compare-runs", cls=Verb, help_group="Look at runs")
@click.argument("first", type=RUN_PLACE, metavar="RUN")
@click.argument("second", type=RUN_PLACE, metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def compare_runs(first: "Path | ObjectUrl", second: "Path | ObjectUrl", *, as_json: bool) -> None:
    """Two runs: equal bits, or the first step and array that differ. Exit code 1 if they do."""
    from samecurve_products.report.compare.compare_runs import compare, describe_comparison

    paths = at_hand(first, "newest"), at_hand(second, "newest")
    comparison = compare(*paths)
    if as_json:
        echo(json.dumps(comparison.to_json(), indent=1))
    else:
        echo("\n".join(describe_comparison(comparison, *paths)))
    sys.exit(0 if comparison.equal else 1)
