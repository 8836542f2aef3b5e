"""`samecurve data`."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import click

from samecurve.seam import (
    PATH,
    ConfigVerb,
    InvalidConfigError,
    SamecurveError,
    Verb,
    VerbGroup,
    echo,
    load_config,
)


@click.group(cls=VerbGroup, help_group="Data and configs")
def data() -> None:
    """Show what a task will read, or make a data set."""


@data.command(cls=Verb)
@click.option(
    "--synthetic",
    "directory",
    type=PATH,
    required=True,
    metavar="DIR",
    help="a new directory, in which a synthetic set is written in the data set's own layout",
)
def har(*, directory: Path) -> None:
    """Make a data set of walking and resting people, for task timeseries."""
    from samecurve_products.sensors.synthetic import write_set

    lines = write_set(directory)
    echo("\n".join(lines))
    echo(f"wrote  {directory}; samecurve train -f models/har.yaml -d {shlex.quote(str(directory))}")


@data.command(cls=Verb)
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--count",
    type=click.IntRange(1, 1_000_000),
    default=2400,
    show_default=True,
    help="how many pictures",
)
@click.option(
    "--size",
    type=click.IntRange(16, 1024),
    default=32,
    show_default=True,
    help="pixels of a picture, across and down",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="other places, sizes and grounds",
)
def shapes(*, directory: Path, count: int, size: int, seed: int) -> None:
    """Draw a small set of pictures with captions ("a red circle"), for task diffusion.

    DIR is a new directory. The same options give the same files.
    """
    from samecurve_products.pictures.diffusion.data.shapes import write_shapes

    lines = write_shapes(directory, count=count, size=size, seed=seed)
    echo("\n".join(lines))
    echo(f"wrote  {directory}; --set data.source={shlex.quote(str(directory))} trains on it")


@data.command(cls=Verb)
@click.argument("directory", type=PATH, metavar="DIR")
@click.option(
    "--count",
    type=click.IntRange(2, 10_000_000),
    default=2000,
    show_default=True,
    help="how many images to train on; a tenth as many are drawn to test on",
)
@click.option(
    "--size",
    type=click.IntRange(32, 128),
    default=32,
    show_default=True,
    help="pixels of an image, across and down",
)
@click.option(
    "--contour",
    type=click.Choice(["9", "14", "20"]),
    default="9",
    show_default=True,
    help="dashes of the longest contours",
)
@click.option(
    "--shortest",
    type=click.IntRange(1),
    help="dashes of the shortest of the two long contours; if not given as --contour",
)
@click.option(
    "--distractors",
    type=click.IntRange(0, 4),
    default=4,
    show_default=True,
    help="short contours beside the two long ones",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="another one draws other images",
)
def pathfinder(
    *,
    directory: Path,
    count: int,
    size: int,
    contour: str,
    shortest: int | None,
    distractors: int,
    seed: int,
) -> None:
    """Draw images with two dots, which lie on one dashed contour or on two, for task vision.

    DIR is a new directory: a folder for each class, and sheet.png to look at. The same options give
    the same files.
    """
    from samecurve_products.pictures.vision.data.pathfinder_set import Drawing, write_pathfinder

    drawing = Drawing(
        size=size, contour=int(contour), distractors=distractors, seed=seed, shortest=shortest
    )
    lines = write_pathfinder(directory, drawing, count)
    echo("\n".join(lines))
    echo(f"wrote  {directory}")


@data.command(cls=ConfigVerb)
@click.option(
    "--samples",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="how many of the run's first samples are shown",
)
@click.option(
    "--split",
    type=click.Choice(["train", "eval", "test"]),
    default="train",
    show_default=True,
    help="whose samples are shown",
)
@click.option("--json", "as_json", is_flag=True, help="the blocks of the page Data, as JSON")
def show(
    *, samples: int, split: Literal["train", "eval", "test"], as_json: bool, **flags: Any
) -> None:
    """Show what a run will read: its first samples as they go into the model, counts, lengths,
    classes, and what is left out and why. Builds no model.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # reading data needs no GPU
    try:
        with _stdout_for_answer():
            loaded = load_config(flags, say=False)
            from samecurve_products.page.data_show import data_blocks

            blocks = data_blocks(loaded.config, split=split, samples=samples)
    except SamecurveError as error:
        if as_json:
            echo(json.dumps({"errors": _errors(error)}))
        raise
    if as_json:
        sys.stdout.write(json.dumps({"blocks": blocks}, allow_nan=False) + "\n")
        return
    from samecurve_products.page.block_text import BlockText

    notes = [{"type": "text", "text": f"note   {note}"} for note in loaded.notes]
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write(BlockText(coloured=coloured).show([*notes, *blocks]) + "\n")


def _errors(error: SamecurveError) -> list[dict[str, str]]:
    errors = error.errors if isinstance(error, InvalidConfigError) else (error,)
    return [{"cause": one.cause, "remedy": one.remedy, "where": one.where} for one in errors]


@contextmanager
def _stdout_for_answer() -> Iterator[None]:
    """Within the block, what a user's file or a library prints goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
