"""Clips of a bright square that moves to the left or to the right, and goes on at the other edge.

A square is anywhere in either class, so one frame does not tell them apart.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("left", "right")


def clip(number: int, *, frames: int = 4, side: int = 12) -> NDArray[np.uint8]:
    """Clip of a number: [frames, side, side, 1]; those of odd numbers go to the right."""
    random = np.random.default_rng(number)
    left, top = random.integers(0, side, 2)
    speed = int(random.integers(1, 3)) * (1 if number % 2 else -1)
    pixels = random.integers(0, 60, (frames, side, side, 1)).astype(np.uint8)
    for frame in range(frames):
        across = (left + speed * frame + np.arange(4)) % side
        down = (top + np.arange(4)) % side
        pixels[frame, down[:, None], across] = 230
    return pixels


def write_npz(file: Path, count: int, *, frames: int = 4, side: int = 12) -> Path:
    """An .npz file with so many clips, half of each class."""
    clips = np.stack([clip(number, frames=frames, side=side) for number in range(count)])
    labels = np.array([CLASSES[number % 2] for number in range(count)])
    np.savez(file, images=clips, labels=labels)
    return file


def write_folders(root: Path, numbers: Sequence[int], *, frames: int = 4, side: int = 12) -> Path:
    """A folder for each class, with a folder for each clip; frames are named 1.png, 2.png, ..."""
    for number in numbers:
        home = root / CLASSES[number % 2] / f"clip-{number:03}"
        home.mkdir(parents=True)
        for frame, pixels in enumerate(clip(number, frames=frames, side=side), 1):
            Image.fromarray(pixels[..., 0]).save(home / f"{frame}.png")
    return root
