"""`samecurve export`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from samecurve.cli.options import PATH, RUN_PLACE, Verb, best_option, trust_option
from samecurve.cli.places import at_hand
from samecurve.terminal import echo

if TYPE_CHECKING:
    from samecurve.storage.url import ObjectUrl


@click.command(cls=Verb, help_group="Other programs")
@click.argument("run", type=RUN_PLACE)
@click.option(
    "--to",
    required=True,
    type=PATH,
    metavar="DIR",
    help="where to; a directory that is not there yet, or is empty",
)
@click.option(
    "--format",
    "layout",
    metavar="FORMAT",
    help="safetensors; or, as the task has it, huggingface (as transformers loads it, with the"
    " tokenizer), peft (an adapter alone), diffusers (a whole pipeline), lora (one file for"
    " front ends). If not given, the one that most programs of the task read",
)
@click.option(
    "--dtype",
    type=click.Choice(["f32", "bf16", "f16"], case_sensitive=False),
    help="of the weights; as they were trained if not given",
)
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="the most that one file holds; more files get an index",
)
@best_option
@trust_option
def export(
    run: "Path | ObjectUrl",
    *,
    to: Path,
    layout: str | None,
    dtype: str | None,
    shard_size: str,
    best: bool,
    trust: bool,
) -> None:
    """A RUN's weights and config for other programs.

    They are those of its newest checkpoint, or of the checkpoint named.
    """
    from samecurve.run.export_weights import export as export_weights
    from samecurve.units import counted, parse_bytes, show_bytes

    try:
        largest_file = parse_bytes(shard_size)
    except ValueError as error:
        raise click.UsageError(f"--shard-size {shard_size}: {error}") from None
    path = at_hand(run, "best" if best else "newest")
    if best:
        from samecurve.run.weights.opened_checkpoint import best_checkpoint

        path = best_checkpoint(path)
    exported = export_weights(path, to, layout, dtype, largest_file, trust=trust)
    for note in exported.notes:
        echo(f"warn   {note}", err=True)
    metrics = exported.metrics
    evaluated = ""
    if "loss" in metrics:
        evaluated = f"; evaluated at step {metrics['step']}: loss {metrics['loss']:.4f}"
    files = counted(exported.files, "file")
    echo(
        f"export step {exported.step}  {exported.arrays} arrays"
        f"  {show_bytes(exported.weight_bytes)} in {files}  {exported.dtype}  {to}{evaluated}"
    )
    echo(
        f"       left out: optimizer state and counters ({exported.arrays_left_out} arrays);"
        " the run keeps them"
    )
