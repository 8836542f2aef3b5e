"""Pathfinder images as rows, drawn once into the cache or each time one is read; and as files.

Before the first step each rank draws a part of the blocks that the cache lacks.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system import directory_made_once
from samecurve.core.system.cache import entry_fault
from samecurve.seam import (
    Ids,
    UserError,
    cache_entry,
    cache_key,
    counted,
    explain_os_error,
    show_progress,
    show_seconds,
)
from samecurve_products.pictures.vision.data.image_sets import ImageRows, ImageSets
from samecurve_products.pictures.vision.data.pathfinder import (
    CLASSES,
    MOST,
    VERSION,
    draw_image,
    least_dashes,
    least_size,
)
from samecurve_products.pictures.vision.sections import DRAWN_SIZE, VisionData

SHEET = "sheet.png"
_PIXELS, _LABELS = "pixels.npy", "labels.npy"
_BLOCK = 500  # images of a cache entry
_MEASURED = 200  # images whose brightness is measured
_SAID_FROM = 20.0  # seconds of drawing that the plan announces
_SHEET_SIDE, _SHEET_IMAGES = 192, (4, 6)  # pixels of an image on the sheet; images down, across
_FRAMES = (70, 220)  # greys around an image, by label
_TEST_SHARE = 0.1  # of the images to train on, in a folder


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What the images of a set follow from, beside their numbers."""

    size: int
    contour: int
    distractors: int
    seed: int
    shortest: int | None = None  # dashes of the shortest long contour; None: as `contour`

    def __post_init__(self) -> None:
        """UserError: the image is too small for its contours, or too large; a contour is too short,
        or longer than the longest.
        """
        least = least_size(self.contour)
        if not least <= self.size <= MOST:
            raise UserError(
                f"pathfinder images of {self.size} x {self.size} pixels with contours of"
                f" {self.contour} dashes",
                f"{least} to {MOST} pixels a side",
                "data.resolution",
            )
        fewest = least_dashes(self.contour)
        if self.shortest is not None and not fewest <= self.shortest <= self.contour:
            raise UserError(
                f"the shortest contour has {counted(self.shortest, 'dash')}, the longest"
                f" {self.contour}",
                f"{fewest} to {self.contour} dashes",
                "data.shortest",
            )

    @property
    def identity(self) -> Mapping[str, int]:
        """What names the images."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def length(self) -> str:
        """Of the contours, in words."""
        shorter = "" if self.shortest is None else f"{self.shortest} to "
        return f"{shorter}{self.contour} dashes"

    def draw(self, number: int) -> tuple[NDArray[np.uint8], int]:
        return draw_image(number, **asdict(self))

    def rows(self, numbers: Iterable[int]) -> Mapping[str, NDArray[Any]]:
        drawn = [self.draw(number) for number in numbers]
        pixels = np.stack([image for image, _ in drawn])[..., None]
        return {"pixels": pixels, "labels": np.array([label for _, label in drawn], np.int64)}


@dataclass(frozen=True)
class Block:
    """Images first, first + 1, ... of a set, as one entry of the cache."""

    drawing: Drawing
    first: int
    count: int
    cache: Path

    @property
    def home(self) -> Path:
        identity = ["pathfinder", VERSION, self.drawing.identity, self.first, self.count]
        return self.cache / "vision" / cache_key(identity)

    @property
    def is_done(self) -> bool:
        return entry_fault(self.home) is None

    def do(self) -> None:
        cache_entry(self.home, self._draw, say=show_progress)

    def read(self) -> ImageRows:
        """The images, mapped from the entry's files."""
        return ImageRows(np.load(self.home / _PIXELS, mmap_mode="r"), np.load(self.home / _LABELS))

    def _draw(self, scratch: Path) -> None:
        rows = self.drawing.rows(range(self.first, self.first + self.count))
        np.save(scratch / _PIXELS, rows["pixels"])
        np.save(scratch / _LABELS, rows["labels"])


class PathfinderRows:
    """Images first, first + 1, ... of a set.

    An image is read from its block in the cache, or drawn where the block is not made yet, as for a
    plan: its bytes are the same. cache: None: each image is drawn when it is read
    """

    def __init__(self, drawing: Drawing, first: int, count: int, cache: Path | None) -> None:
        self._drawing, self._first, self._count = drawing, first, count
        self._blocks = {}
        if cache is not None:
            self._blocks = {
                begin: Block(drawing, first + begin, min(_BLOCK, count - begin), cache)
                for begin in range(0, count, _BLOCK)
            }
        self._read: dict[int, ImageRows] = {}  # blocks that were there, by their first id

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]:
        wanted = np.asarray(ids)
        side = self._drawing.size
        pixels = np.empty((len(wanted), side, side, 1), np.uint8)
        labels = np.empty(len(wanted), np.int64)
        begins = wanted // _BLOCK * _BLOCK
        for begin in np.unique(begins).tolist():
            places = np.flatnonzero(begins == begin)
            rows = self._rows_of(begin, wanted[places] - begin)
            pixels[places], labels[places] = rows["pixels"], rows["labels"]
        return {"pixels": pixels, "labels": labels}

    @property
    def blocks(self) -> Sequence[Block]:
        """What is to be drawn before the first step."""
        return list(self._blocks.values())

    def _rows_of(self, begin: int, ids: Ids) -> Mapping[str, NDArray[Any]]:
        """Images by their place behind the first one of a block."""
        block = self._blocks.get(begin)
        if begin not in self._read and block is not None and block.is_done:
            self._read[begin] = block.read()
        if begin in self._read:
            return self._read[begin][ids]
        return self._drawing.rows([self._first + begin + int(place) for place in ids])


def stamp_pathfinder(data: VisionData) -> object:
    return ["pathfinder", VERSION, _drawing(data).identity]


def read_pathfinder(data: VisionData, cache: Path) -> ImageSets:
    """The images of a data section. UserError: they would be too small or too large."""
    drawing = _drawing(data)
    held_out = round(data.samples * data.validation)
    firsts = {"train": 0, "validation": data.samples, "test": data.samples + held_out}
    counts = {"train": data.samples, "validation": held_out, "test": held_out}
    rows = {
        name: PathfinderRows(drawing, firsts[name], count, cache if data.cached else None)
        for name, count in counts.items()
        if count
    }
    began = time.perf_counter()
    measured = rows["train"][np.arange(min(data.samples, _MEASURED))]
    each = (time.perf_counter() - began) / len(measured["labels"])
    mean, std = ImageRows(measured["pixels"], measured["labels"]).channels()
    identity = json.dumps([stamp_pathfinder(data), counts])
    length = f"{drawing.length}, {counted(drawing.distractors, 'distractor')}"
    return ImageSets(
        train=rows["train"],
        validation=rows.get("validation"),
        test=rows.get("test"),
        classes=CLASSES,
        shape=(drawing.size, drawing.size, 1),
        mean=mean,
        std=std,
        sha256=hashlib.sha256(identity.encode()).hexdigest(),
        counts=[-(-data.samples // 2), data.samples // 2],
        lines=[
            f"pathfinder, drawn with seed {drawing.seed}: contours of {length}",
            *_say_drawing(rows.values(), each),
        ],
        to_make=[block for part in rows.values() for block in part.blocks],
    )


def _say_drawing(rows: Iterable[PathfinderRows], seconds_each: float) -> list[str]:
    """The line about images that are drawn before the first step, where that takes a while.

    seconds_each: time that an image took which the plan has drawn for itself
    """
    blocks = [block for part in rows for block in part.blocks]
    if not blocks or blocks[0].is_done:
        return []
    count = sum(block.count for block in blocks)
    seconds = seconds_each * count
    if seconds < _SAID_FROM:
        return []
    return [
        f"{count:,} images are drawn once, before the first step (about {show_seconds(seconds)} on"
        " one core, shared among the ranks), and kept in the cache"
    ]


def _drawing(data: VisionData) -> Drawing:
    return Drawing(
        size=data.resolution or DRAWN_SIZE,
        contour=data.contour,
        distractors=data.distractors,
        seed=data.seed,
        shortest=data.shortest,
    )


def write_pathfinder(home: Path, drawing: Drawing, count: int) -> list[str]:
    """Write a set as a folder of images, whole or not at all. Returns lines for the user.

    `count` images in train/CLASS, a tenth as many in test/CLASS, and sheet.png to look at.

    UserError: the directory is not empty, or can't be written to.
    """
    if home.exists() and not (home.is_dir() and not any(home.iterdir())):
        raise UserError(
            f"{home} is there already, and is not empty", "a new directory, or an empty one", "DIR"
        )
    held_out = max(1, round(count * _TEST_SHARE))
    try:
        with directory_made_once(home) as scratch:
            _write_images(scratch / "train", drawing, 0, count)
            _write_images(scratch / "test", drawing, count, held_out)
            _write_sheet(scratch / SHEET, drawing)
    except OSError as error:
        raise UserError(*explain_os_error(error, home, "write it again"), "DIR") from error
    size = f"{drawing.size} x {drawing.size} pixels"
    return [
        f"images  {count:,} to train on and {held_out:,} to test on, of {size}, in the folders"
        f" {' and '.join(CLASSES)}",
        f"look    {home / SHEET}: those with a bright frame are {CLASSES[1]}",
    ]


def _write_images(home: Path, drawing: Drawing, first: int, count: int) -> None:
    from PIL import Image

    for name in CLASSES:
        (home / name).mkdir(parents=True)
    digits = len(str(first + count - 1))
    for number in range(first, first + count):
        pixels, label = drawing.draw(number)
        Image.fromarray(pixels).save(home / CLASSES[label] / f"{number:0{digits}d}.png")


def _write_sheet(file: Path, drawing: Drawing) -> None:
    """Write the first images, enlarged, as one picture."""
    from PIL import Image

    down, across = _SHEET_IMAGES
    times = max(1, _SHEET_SIDE // drawing.size)
    framed = []
    for number in range(down * across):
        pixels, label = drawing.draw(number)
        larger = pixels.repeat(times, 0).repeat(times, 1)
        framed.append(np.pad(larger, 3, constant_values=_FRAMES[label]))
    lines = [np.concatenate(framed[line * across : (line + 1) * across], 1) for line in range(down)]
    Image.fromarray(np.concatenate(lines)).save(file)
