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
@click.argument("run", type=Path)
@click.option("--to", required=True, type=Path, metavar="DIR", help="where to; a directory that is not there yet, or is empty")
@click.option("--format", "form", type=click.Choice(["safetensors", "huggingface"]), default="safetensors", show_default=True, help="huggingface: as transformers loads it, with the tokenizer (task language)")
@click.option("--dtype", type=click.Choice(["f32", "bf16", "f16"]), help="of the weights; as they were trained if not given")
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="the most that one file holds; more files get an index")
def export(run: Path, to: Path, form: str, dtype: str | None, shard_size: str) -> None:
    """A RUN's weights and config for other programs.

    They are those of its newest checkpoint, or of the checkpoint named.
    """
    from lockstep.launch.export import export as make
    from lockstep.units import parse_bytes, show_bytes

    try:
        largest = parse_bytes(shard_size)
    except ValueError as error:
        raise click.UsageError(f"--shard-size {shard_size}: {error}") from None
    made = make(run, to, form, dtype, largest)
    for note in made.notes:
        click.echo(f"warn   {note}", err=True)
    measured = f"; evaluated at step {made.metrics['step']}: loss {made.metrics['loss']:.4f}" if "loss" in made.metrics else ""
    click.echo(f"export step {made.step}  {made.arrays} arrays  {show_bytes(made.bytes)} in {made.files} file{'s' if made.files > 1 else ''}  {made.dtype}  {to}{measured}")
    click.echo(f"       left out: optimizer state and counters ({made.left} arrays); the run keeps them")
