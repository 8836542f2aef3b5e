"""The images that data.source names."""

import json
from collections.abc import Sequence
from pathlib import Path

from samecurve.data import spread_out
from samecurve.seam import Source, UserError, stamp_file
from samecurve_products.pictures.vision.data.clip_folders import read_clips
from samecurve_products.pictures.vision.data.digits import read_digits, stamp_digits
from samecurve_products.pictures.vision.data.folder_images import read_folder, stamp_folder
from samecurve_products.pictures.vision.data.image_sets import ImageSets
from samecurve_products.pictures.vision.data.npz_files import read_npz
from samecurve_products.pictures.vision.data.pathfinder_set import read_pathfinder, stamp_pathfinder
from samecurve_products.pictures.vision.data.shard_images import (
    is_shards,
    read_shards,
    stamp_shards,
)
from samecurve_products.pictures.vision.sections import DIGITS, PATHFINDER, VisionData


def open_images(data: VisionData, cache: Path) -> ImageSets:
    """The images of a data section. UserError: they are missing or unfit."""
    is_files = is_folder(data.source) or is_shards(data.source)
    if data.frames is not None and not is_files:
        raise UserError(
            f"data.frames is of pictures in files, and data.source is {data.source}",
            "leave data.frames out; clips in an .npz file are images [clips, frames, height, width,"
            " channels]",
            "data.frames",
        )
    if data.source == DIGITS:
        return read_digits(data.validation)
    if data.source == PATHFINDER:
        return read_pathfinder(data, cache)
    if is_folder(data.source):
        read = read_folder if data.frames is None else read_clips
        return read(data, cache, _known_classes(data))
    if is_shards(data.source):
        return read_shards(data, cache, _known_classes(data))
    return read_npz(_file(data.source), data.validation)


def stamp_images(data: VisionData) -> object:
    """What the images are made from, told cheaply. UserError: a file is missing."""
    kept = [] if data.like_run is None else [stamp_file(Path(data.like_run))]
    if data.source == DIGITS:
        return [stamp_digits(), *kept]
    if data.source == PATHFINDER:
        return [stamp_pathfinder(data), *kept]
    if is_folder(data.source):
        return [stamp_folder(data), *kept]
    if is_shards(data.source):
        return [stamp_shards(data), *kept]
    return [stamp_file(_file(data.source)), *kept]


def is_folder(source: str) -> bool:
    """Whether a source is a folder of classes."""
    return Path(source).expanduser().is_dir()


def evaluated(source: Source | None, data: VisionData) -> Source | None:
    """The held-out images that an evaluation reads; None: there are none."""
    return None if source is None else spread_out(source, data.eval_samples)


def _known_classes(data: VisionData) -> Sequence[str] | None:
    """The classes of the run that data.like_run names; None: the source's own."""
    if data.like_run is None:
        return None
    try:
        classes: list[str] = json.loads(Path(data.like_run).read_text())["classes"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{data.like_run} can't be read as the images of a run: {error}",
            "the file assets/images.json of a run of task vision",
            "data.like_run",
        ) from None
    return classes


def _file(source: str) -> Path:
    """UserError: there is no such .npz file."""
    path = Path(source).expanduser().resolve()
    if path.suffix != ".npz" or not path.is_file():
        missing = "there are no images" if path.exists() else "there is nothing"
        raise UserError(
            f"{missing} at {path}",
            "a folder with a folder of pictures for each class, an .npz file, shards (*.tar,"
            f" *.parquet), {DIGITS} or {PATHFINDER}",
            "data.source",
        )
    return path
