"""`samecurve sample`."""

import sys
from pathlib import Path

import click

from samecurve.cli.options import Verb


@click.command(cls=Verb)
@click.argument("run", type=Path)
@click.option("--prompt", default="", help="what the text begins with")
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="length of the continuation",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 10),
    default=0.8,
    show_default=True,
    help="0: always the likeliest token",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="the same seed gives the same text",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1")
def sample(
    run: Path, *, prompt: str, tokens: int, temperature: float, seed: int, device: str
) -> None:
    """What the model of a RUN makes, from its newest checkpoint (or the checkpoint named)."""
    from samecurve.observe.console import printable
    from samecurve.run.sample import sample as draw_sample

    sampled = draw_sample(run, prompt, tokens, temperature, seed, device)
    for note in sampled.notes:
        click.echo(f"warn   {note}", err=True)
    click.echo(printable(sampled.text) if sys.stdout.isatty() else sampled.text)
