"""Folders of small pictures with captions, of several shapes, for tests of the diffusion task."""

from pathlib import Path

import numpy as np
from PIL import Image

SIDES = ((16, 16), (16, 16), (24, 12), (12, 24), (16, 16), (24, 12), (20, 20))


def write_pictures(folder: Path, count: int = 17) -> Path:
    """Pictures of noise in several shapes, each with a caption of two parts."""
    folder.mkdir(parents=True)
    for number in range(count):
        random = np.random.default_rng(number)
        width, height = SIDES[number % len(SIDES)]
        colours = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(colours).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"picture {number % 3}, of noise")
    return folder
