"""A run's pictures: PNG files under RUN/samples, named by the `sampled` lines of its journal."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samecurve.core.events import Event
from samecurve.core.protocols import Picture
from samecurve.core.system import read_file_bytes
from samecurve.errors import UserError

_FOLDER = "samples"
_MOST_BYTES = 1 << 28
_PNG = b"\x89PNG\r\n\x1a\n"


def pictures(event: Event) -> list[str]:
    """The pictures of a `sampled` event: PNG files, their paths relative to the run directory."""
    return [str(path) for path in event.values.get("pictures", ())]


def png(run: Path, name: str, most: int = _MOST_BYTES) -> bytes:
    """The bytes of a picture. most: how many it may have

    ValueError: the file is no PNG, or lies outside the run directory. OSError: it can't be read.
    """
    path = (run / name).resolve()
    if not path.is_relative_to(run.resolve()):
        raise ValueError("it lies outside the run directory")
    content = read_file_bytes(path, most)
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is no PNG")
    return content


def keep_pictures(
    run: Path, step: int, shown: Sequence[Picture], *, asked: bool = False
) -> list[str]:
    """Write the samples of a step; return their paths relative to the run directory.

    asked: by a command, beside training: files get names that are not taken yet
    UserError: a sample is no picture.
    """
    (run / _FOLDER).mkdir(exist_ok=True)
    begin = "step"
    if asked:
        number = sum(1 for _ in (run / _FOLDER).glob("asked-*-0.png"))
        begin = f"asked-{number}-step"
    names = []
    for index, picture in enumerate(shown):
        name = f"{_FOLDER}/{begin}-{step:08d}-{index}.png"
        write_png(run / name, picture)
        names.append(name)
    return names


def write_png(path: Path, picture: Picture) -> None:
    """Write a picture: uint8 of (height, width, 3) or (height, width), else UserError."""
    from PIL import Image  # late: only runs with pictures need it

    check_picture(picture)
    Image.fromarray(np.ascontiguousarray(picture)).save(path, format="PNG")


def check_picture(picture: object) -> None:
    """Refuse a sample that is no picture with a UserError."""
    remedy = (
        "numpy uint8 arrays of (height, width, 3) or (height, width); for numbers between 0 and 1:"
        " (255 * picture).round().astype(numpy.uint8)"
    )
    if not isinstance(picture, np.ndarray):
        raise UserError(f"sample() gives a {type(picture).__name__}", f"texts, or {remedy}", "task")
    colours = picture.shape[2:]
    if picture.dtype != np.uint8 or picture.ndim not in {2, 3} or colours not in {(), (3,)}:
        raise UserError(
            f"sample() gives {picture.dtype} of shape {picture.shape}, which is no picture",
            remedy,
            "task",
        )
    if not picture.size:
        raise UserError(f"sample() gives an empty picture, {picture.shape}", remedy, "task")
