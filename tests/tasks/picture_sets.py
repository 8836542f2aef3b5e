"""Small folders of pictures, as people have them on disk."""

import io
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from samecurve.errors import UserError
from samecurve_products.pictures.diffusion.data.picture_set import PictureSet, open_pictures
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.scan import Picture
from samecurve_products.pictures.diffusion.sections import DiffusionData

SMALL = {"resolution": 16, "bucket_step": 4, "validation": 0.0}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture that no other seed gives."""
    pixels = np.random.default_rng((seed, width, height)).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def write_folder(home: Path, files: Mapping[str, bytes | str | Image.Image]) -> Path:
    """A folder with these files: bytes, texts, or pictures, as their names end."""
    for name, content in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Image.Image):
            content.save(path)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_bytes(content)
    return home


def captioned(home: Path, count: int, sides: tuple[int, int] = (16, 16), first: int = 0) -> Path:
    """A folder of pictures, each with its caption: 000.png, 000.txt, ..."""
    for number in range(first, first + count):
        name = f"{number:03d}"
        write_folder(home, {f"{name}.png": noise(*sides, number), f"{name}.txt": f"no {number}"})
    return home


def data_of(source: Any, **fields: Any) -> DiffusionData:
    source = str(source) if isinstance(source, Path) else source
    return DiffusionData(source=source, **{**SMALL, **fields})


def quietly(line: str) -> None:
    """How far a scan is: nobody wants to know."""
    assert line


def opened(source: Any, cache: Path, **fields: Any) -> PictureSet:
    """The pictures of a folder; nothing is said on the way."""
    return open_pictures(data_of(source, **fields), cache, say=quietly)


def refusal(source: Any, cache: Path, **fields: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        opened(source, cache, **fields)
    return caught.value


def pictures_of(samples: Samples | None) -> list[Picture]:
    return [] if samples is None else [picture for picture, _ in samples.pictures]


def rgb(content: bytes) -> NDArray[np.uint8]:
    """What PIL itself shows of a plain RGB file: [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


SIDES = [(16, 16), (40, 20), (20, 40), (17, 30), (64, 64), (33, 16), (16, 33)]


def mixed(home: Path, count: int = 14) -> Path:
    """Pictures of several shapes."""
    files: dict[str, Any] = {}
    for number in range(count):
        files[f"{number:02d}.png"] = noise(*SIDES[number % len(SIDES)], number)
        files[f"{number:02d}.txt"] = f"number {number}"
    return write_folder(home, files)


def buckets_of(samples: Samples) -> list[NDArray[np.int64]]:
    """The ids of each bucket."""
    ends = np.cumsum([0, *samples.bucket_sizes])
    return [np.arange(*pair) for pair in pairwise(ends)]
