"""The verbs for what a run leaves behind. As in cli.py: parse, call one function, print one thing."""

import sys
from pathlib import Path

import click

from lockstep.flags import Verb


@click.command(cls=Verb)
@click.argument("run", type=Path)
@click.option("--prompt", default="", help="what the text begins with")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=200, show_default=True, help="length of the continuation")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: always the likeliest token")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="the same seed gives the same text")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1")
def sample(run: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str) -> None:
    """What the model of a RUN makes, from its newest checkpoint (or the checkpoint named)."""
    from lockstep.launch.sampling import sample as make
    from lockstep.observe.console import printable

    made = make(run, prompt, tokens, temperature, seed, device)
    for note in made.notes:
        click.echo(f"warn   {note}", err=True)
    click.echo(printable(made.text) if sys.stdout.isatty() else made.text)


@click.command("compare-runs", cls=Verb)
@click.argument("first", type=Path, metavar="RUN")
@click.argument("second", type=Path, metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
def compare_runs(first: Path, second: Path, as_json: bool) -> None:
    """Equal to the last bit, or the first step and array that differ. Exit code 1 if they do."""
    from lockstep.prove.compare import compare_runs as compare

    sys.exit(compare(first, second, as_json))


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option("--to", type=Path, metavar="DIR", help="where to write; the run's own directory for one run, report/ for several, if not given")
@click.option("--json", "as_json", is_flag=True, help="the summary's numbers as JSON, and no page unless --to asks for one")
def report(runs: tuple[Path, ...], to: Path | None, as_json: bool) -> None:
    """One page (HTML, PNG) for a RUN, or several compared: curves, throughput, memory, plan, environment."""
    import json

    from lockstep.launch.files import Run, is_live
    from lockstep.observe.report.reading import read_runs
    from lockstep.observe.report.write import numbers
    from lockstep.observe.report.write import report as write

    stories = read_runs(runs, lambda home: is_live(Run(home)))
    written = [] if as_json and to is None else write(stories, to)
    if as_json:
        click.echo(json.dumps({**numbers(stories), "files": list(map(str, written))}, indent=1))
    else:
        click.echo("\n".join(click.format_filename(path) for path in written))
