"""What every source of images gives to the vision task, and images that lie in arrays.

Rows have `pixels`, uint8 [height, width, channels], and `labels`, int64; a short video (a clip) has
pixels [frames, height, width, channels]. The loss divides the pixels by 255 and normalises them on
the device, so that a feed carries bytes. Floating-point pixels are taken as they are, between 0 and
1, and normalised as well.

A recipe may add `labels_2`, int64, and `mix`, float32 in [0, 1]: a mixed image counts `mix` for its
label, and the rest for its second label.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Ids, Source
from samecurve_products.task_parts.made_files import Work

_MEASURED = 10_000  # images, spread over the set, whose channels are measured
_SPLIT = 0x73706C6974  # a number that stands for the split


@dataclass(frozen=True, kw_only=True)
class ImageSets:
    """The images of a source.

    train, validation, test: their rows; None: there are none
    classes: names, by number
    shape: height, width and channels of an image
    frames: of a clip; None: the rows are single images
    mean, std: of each channel of the images to train on, where 1 is white
    sha256: of all that the rows follow from
    counts: images to train on of each class, by number
    lines: for the user
    to_make: files in the cache that are to be made before the first step
    """

    train: Source
    validation: Source | None
    test: Source | None
    classes: Sequence[str]
    shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    sha256: str
    counts: Sequence[int]
    lines: Sequence[str] = ()
    to_make: Sequence[Work] = ()
    frames: int | None = None


class ImageRows:
    """Images in an array, which may be mapped from a file.

    pixels: uint8 or floating point [images, height, width, channels], or clips [clips, frames,
        height, width, channels]. labels: int64 [images]
    ids: the images that become rows; None: all
    """

    def __init__(
        self, pixels: NDArray[Any], labels: NDArray[np.int64], ids: Ids | None = None
    ) -> None:
        self._pixels, self._labels = pixels, labels
        self._ids = np.arange(len(labels)) if ids is None else np.asarray(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]:
        of_images = self._ids[np.asarray(ids)]
        return {"pixels": np.asarray(self._pixels[of_images]), "labels": self._labels[of_images]}

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._labels[self._ids]

    def image(self, number: int) -> NDArray[Any]:
        """The pixels of one image, [height, width, channels], or of one clip."""
        return np.asarray(self._pixels[self._ids[number]])

    def channels(self) -> tuple[list[float], list[float]]:
        """Mean and deviation of each channel, where 1 is white; a deviation of 0 counts as 1."""
        step = -(-len(self._ids) // _MEASURED)
        pixels = np.asarray(self._pixels[self._ids[::step]])
        values = pixels.reshape(-1, pixels.shape[-1]).astype(np.float64)
        values /= 255 if pixels.dtype == np.uint8 else 1
        deviation = values.std(axis=0)
        return values.mean(axis=0).tolist(), np.where(deviation > 0, deviation, 1.0).tolist()

    def digest(self) -> str:
        """A SHA-256 of pixels and labels."""
        sha256 = hashlib.sha256()
        for array in (np.asarray(self._pixels[self._ids]), self.labels):
            sha256.update(f"{array.dtype.str}{array.shape}".encode())
            sha256.update(np.ascontiguousarray(array).tobytes())
        return sha256.hexdigest()


class JoinedRows:
    """The images of several sources, one after the other.

    numbers: the label of each class, by its number in the sources
    """

    def __init__(self, sources: Sequence[Source], numbers: Sequence[int]) -> None:
        self._sources, self._numbers = sources, np.asarray(numbers)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]:
        wanted = np.asarray(ids)
        of_source = np.searchsorted(self._ends, wanted, side="right")
        rows: dict[str, NDArray[Any]] = {}
        for number, source in enumerate(self._sources):
            places = np.flatnonzero(of_source == number)
            if not len(places):
                continue
            begin = self._ends[number] - len(source)
            for name, array in source[wanted[places] - begin].items():
                if name not in rows:
                    rows[name] = np.zeros((len(wanted), *array.shape[1:]), array.dtype)
                rows[name][places] = array
        return {**rows, "labels": self._numbers[rows["labels"]]}


def split_ids(count: int, share: float) -> tuple[Ids, Ids]:
    """Ids to train on and ids that are held out; which ones follows from their number alone."""
    order = np.random.default_rng((_SPLIT, count)).permutation(count)
    held_out = round(count * share)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def image_sets(
    parts: Mapping[str, ImageRows], classes: Sequence[str], lines: Sequence[str]
) -> ImageSets:
    """The set of images in arrays. parts: train, and validation and test if there are any."""
    train = parts["train"]
    rows = train[np.arange(1)]["pixels"]
    mean, std = train.channels()
    sha256 = hashlib.sha256("".join(f"{name}{parts[name].digest()}" for name in parts).encode())
    counts = np.bincount(train.labels, minlength=len(classes)).tolist()
    *clip, height, width, channels = rows.shape[1:]
    return ImageSets(
        train=train,
        validation=parts.get("validation"),
        test=parts.get("test"),
        classes=classes,
        shape=(height, width, channels),
        mean=mean,
        std=std,
        sha256=sha256.hexdigest(),
        counts=counts,
        lines=lines,
        frames=clip[0] if clip else None,
    )
