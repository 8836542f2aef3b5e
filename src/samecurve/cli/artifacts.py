"""The verbs for what a run leaves behind.

As in cli.py: parse, call one function, print one thing.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import click

from samecurve.cli.options import Verb, terminated


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
def sample(run: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str) -> None:
    """What the model of a RUN makes, from its newest checkpoint (or the checkpoint named)."""
    from samecurve.observe.console import printable
    from samecurve.run.sample import sample as make

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
    from samecurve.experiments.compare import compare_runs as compare

    sys.exit(compare(first, second, as_json))


@click.command("eval", cls=Verb)
@click.argument("run", type=Path)
@click.option(
    "-d",
    "--data",
    type=str,
    help="evaluate on all of this instead of what the run held back: data.source",
)
@click.option(
    "--on",
    type=click.Choice(["held-out", "train"]),
    default="held-out",
    show_default=True,
    help="what was held back, or what the run trained on",
)
@click.option(
    "--devices", type=str, help="auto, all, cpu, cpu:N, or indices: 0,1; the run's own if not given"
)
@click.option("--gpus", type=str, metavar="0,1", help="GPUs by index")
@click.option("--strategy", type=str, help="auto, single, dp, ddp, fsdp, hsdp")
@click.option("--engine", type=str, help="torch, jax")
@click.option("--dtype", type=str, help="f32, bf16, f16, f64")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="any config value")
@click.option(
    "--json", "as_json", is_flag=True, help="the metrics as JSON, and nothing else on stdout"
)
def evaluate(
    run: Path,
    data: str | None,
    on: Any,
    devices: str | None,
    gpus: str | None,
    strategy: str | None,
    engine: str | None,
    dtype: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """The metrics of a RUN's newest checkpoint (or of the checkpoint named), on any devices."""
    import json

    from samecurve.core.config.document import parse_setting
    from samecurve.launch.evaluate import evaluate as measure
    from samecurve.units import show_seconds

    signal.signal(signal.SIGTERM, terminated)
    given = {
        "devices.use": (gpus or devices, "--gpus" if gpus else "--devices"),
        "devices.strategy": (strategy, "--strategy"),
        "engine": (engine, "--engine"),
        "train.precision": (dtype, "--dtype"),
    }
    chosen = {key: (value, flag) for key, (value, flag) in given.items() if value is not None}
    for setting in settings:
        key, value = parse_setting(setting)
        chosen[key] = (value, f"--set {key}")
    found = measure(run, chosen, data, on, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(
            json.dumps(
                {
                    "step": found.step,
                    "samples": found.samples,
                    **found.metrics,
                    "seconds": found.seconds,
                }
            )
        )
    else:
        shown = "  ".join(
            f"{name} {'not finite' if value is None else format(value, '.4f')}"
            for name, value in found.metrics.items()
        )
        click.echo(
            f"eval   step {found.step}  {shown}  ({found.samples} samples, {found.plan.num_devices} x"
            f" {found.plan.devices[0].kind} {found.plan.strategy}, {show_seconds(found.seconds)})"
        )


@click.command(cls=Verb)
@click.argument("run", type=Path)
@click.option(
    "--to",
    required=True,
    type=Path,
    metavar="DIR",
    help="where to; a directory that is not there yet, or is empty",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "huggingface"]),
    default="safetensors",
    show_default=True,
    help="huggingface: as transformers loads it, with the tokenizer (task language)",
)
@click.option(
    "--dtype",
    type=click.Choice(["f32", "bf16", "f16"]),
    help="of the weights; as they were trained if not given",
)
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="the most that one file holds; more files get an index",
)
def export(run: Path, to: Path, form: str, dtype: str | None, shard_size: str) -> None:
    """A RUN's weights and config for other programs.

    They are those of its newest checkpoint, or of the checkpoint named.
    """
    from samecurve.run.export import export as make
    from samecurve.units import parse_bytes, show_bytes

    try:
        largest = parse_bytes(shard_size)
    except ValueError as error:
        raise click.UsageError(f"--shard-size {shard_size}: {error}") from None
    made = make(run, to, form, dtype, largest)
    for note in made.notes:
        click.echo(f"warn   {note}", err=True)
    measured = (
        f"; evaluated at step {made.metrics['step']}: loss {made.metrics['loss']:.4f}"
        if "loss" in made.metrics
        else ""
    )
    click.echo(
        f"export step {made.step}  {made.arrays} arrays  {show_bytes(made.bytes)} in {made.files}"
        f" file{'s' if made.files > 1 else ''}  {made.dtype}  {to}{measured}"
    )
    click.echo(
        f"       left out: optimizer state and counters ({made.left} arrays); the run keeps them"
    )


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, required=True, type=Path, metavar="RUN...")
@click.option(
    "--to",
    type=Path,
    metavar="DIR",
    help="where to write; the run's own directory for one run, report/ for several, if not given",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="the summary's numbers as JSON, and no page unless --to asks for one",
)
def report(runs: tuple[Path, ...], to: Path | None, as_json: bool) -> None:
    """One page (HTML, PNG) for a RUN, or several compared: curves, throughput, memory, plan,
    environment.
    """
    import json

    from samecurve.observe.report.reading import read_runs
    from samecurve.observe.report.write import numbers
    from samecurve.observe.report.write import report as write
    from samecurve.run.directory import Run
    from samecurve.run.lock import is_live

    stories = read_runs(runs, lambda home: is_live(Run(home)))
    written = [] if as_json and to is None else write(stories, to)
    if as_json:
        click.echo(json.dumps({**numbers(stories), "files": list(map(str, written))}, indent=1))
    else:
        click.echo("\n".join(click.format_filename(path) for path in written))
