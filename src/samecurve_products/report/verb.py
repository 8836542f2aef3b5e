"""`samecurve report`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from samecurve.cli.options import RUN_PLACE
from samecurve.seam import PATH, Verb, at_hand, echo

if TYPE_CHECKING:
    from samecurve.storage.url import ObjectUrl


@click.command(cls=Verb, help_group="Look at runs")
@click.argument("runs", nargs=-1, required=True, type=RUN_PLACE, metavar="RUN...")
@click.option(
    "--to",
    type=PATH,
    metavar="DIR|FILE.html",
    help="where to write; the run's own directory for one run, report/ for several, if not given",
)
@click.option("--png", is_flag=True, help="also each chart as report-NAME.png (needs matplotlib)")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="the summary's numbers as JSON, and no page unless --to or --png asks for one",
)
def report(
    runs: "tuple[Path | ObjectUrl, ...]", *, to: Path | None, png: bool, as_json: bool
) -> None:
    """Make one HTML page of a RUN, or of several compared.

    It shows curves, throughput, memory, the plan and the environment.
    """
    import json

    from samecurve.seam import Run, is_live
    from samecurve_products.report.compare.compare_runs import bits_lines
    from samecurve_products.report.reading import read_runs
    from samecurve_products.report.write_report import report_numbers, write_report

    homes = tuple(at_hand(run, "files") for run in runs)
    for home in homes:
        Run(home).check("RUN")
    records = read_runs(homes, lambda home: is_live(Run(home)))
    written = []
    if not as_json or to or png:
        written = write_report(records, to, pictures=png, bits=bits_lines(records))
    if as_json:
        echo(json.dumps({**report_numbers(records), "files": list(map(str, written))}, indent=1))
    else:
        echo("\n".join(click.format_filename(path) for path in written))
