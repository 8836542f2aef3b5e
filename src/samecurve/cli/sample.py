"""`samecurve sample`."""

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import RUN_PLACE, Verb, trust_option
from samecurve.cli.places import at_hand
from samecurve.terminal import echo

if TYPE_CHECKING:
    from pathlib import Path

    from samecurve.storage.url import ObjectUrl


class Finite(click.FloatRange):
    """An option's type: a number in a range, and no nan."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


@click.command(cls=Verb, help_group="Look at runs")
@click.argument("run", type=RUN_PLACE)
@click.option("--prompt", help="what the text begins with, or what the picture shows")
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    help="length of the continuation; 200 if not given",
)
@click.option(
    "--temperature",
    type=Finite(0, 10),
    help="0: always the likeliest token; 0.8 if not given",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="the same seed gives the same text or picture",
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="the prompt is a turn of a conversation, or text to go on with; if not given: a turn,"
    " where the run was trained on conversations",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1")
@trust_option
def sample(
    run: "Path | ObjectUrl",
    *,
    prompt: str | None,
    tokens: int | None,
    temperature: float | None,
    seed: int,
    chat: bool | None,
    device: str,
    trust: bool,
) -> None:
    """Print what a RUN's model makes, from its newest checkpoint. RUN may be a checkpoint, too."""
    from samecurve.run.sample_run import Prompt
    from samecurve.run.sample_run import sample as draw_samples

    prompted = Prompt(text=prompt, tokens=tokens, temperature=temperature, seed=seed, chat=chat)
    sampled = draw_samples(at_hand(run, "newest"), prompted, device, trust=trust)
    for note in sampled.notes:
        echo(f"warn   {note}", err=True)
    for text in sampled.texts:
        show = echo if sys.stdout.isatty() else click.echo
        show(text)  # redirected, it is the text itself that is wanted
    for file in sampled.pictures:
        echo(f"drawn  {file}")
