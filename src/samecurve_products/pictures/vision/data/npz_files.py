"""Images as arrays in an .npz file.

images [images, height, width] or [images, height, width, channels], or clips [clips, frames,
height, width, channels]; and labels [images], numbers or names. classes: names, optional. Other
spellings are read too: x_train and y_train with x_test and y_test; train_images and train_labels
with val_ and test_ (as MedMNIST has them); x or data with y, label or targets. What is named test
is for the test, and what is named val or validation is for validation; without the latter,
data.validation holds a share out.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, counted
from samecurve_products.pictures.vision.data.image_sets import (
    ImageRows,
    ImageSets,
    image_sets,
    split_ids,
)

Array = NDArray[Any]
_IMAGES = ("images", "image", "x", "data", "pixels")
_LABELS = ("labels", "label", "y", "targets", "target")
_SPLITS = {
    "train": ("", "train"),
    "validation": ("validation", "valid", "val"),
    "test": ("test",),
}
_MOST_CHANNELS = 16  # an axis of more than this is no axis of channels


def read_npz(file: Path, validation: float) -> ImageSets:
    """The images of an .npz file. validation: the share that is held out.

    UserError: an array is missing, or has a wrong form.
    """
    arrays = _load(file)
    names = {split: _names(arrays, split) for split in _SPLITS}
    if names["train"] is None:
        raise UserError(
            f"{file.name} has no images and labels to train on; it has"
            f" {', '.join(sorted(arrays)) or 'no array'}",
            "np.savez(FILE, images=..., labels=...): images [images, height, width, channels], and"
            " a label for each",
            str(file),
        )
    found = {split: pair for split, pair in names.items() if pair is not None}
    images = {split: _images(arrays, pair[0], file) for split, pair in found.items()}
    labels = {
        split: _labels(arrays, pair[1], len(images[split]), file) for split, pair in found.items()
    }
    _check_alike(images, found, file)
    classes, numbers = _numbered(arrays, labels, file)
    parts = {split: ImageRows(images[split], numbers[split]) for split in found}
    if "validation" not in parts:
        train, held_out = split_ids(len(images["train"]), validation)
        parts["train"] = ImageRows(images["train"], numbers["train"], train)
        if len(held_out):
            parts["validation"] = ImageRows(images["train"], numbers["train"], held_out)
    return image_sets(parts, classes, [f"{file}"])


def _load(file: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(file) as archive:
            archive.testzip()
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{file} can't be read as an .npz file: {error}",
            "np.savez(FILE, images=..., labels=...), of plain arrays",
            str(file),
        ) from None


def _names(arrays: Mapping[str, Array], split: str) -> tuple[str, str] | None:
    """The names of a split's images and labels; None: the file has none."""
    found = [
        next((name for name in _spellings(words, split) if name in arrays), None)
        for words in (_IMAGES, _LABELS)
    ]
    images, labels = found
    return None if images is None or labels is None else (images, labels)


def _spellings(words: Sequence[str], split: str) -> Iterator[str]:
    for word in words:
        for name in _SPLITS[split]:
            yield from (f"{word}_{name}", f"{name}_{word}") if name else (word,)


def _images(arrays: Mapping[str, Array], name: str, file: Path) -> Array:
    images = arrays[name]
    if images.ndim == 3:
        images = images[..., None]
    kind = images.dtype.kind
    is_image = images.ndim == 4 or (images.ndim == 5 and images.shape[1] > 1)
    if not is_image or 0 in images.shape or (images.dtype != np.uint8 and kind not in "f"):
        raise UserError(
            f"{name} has shape {arrays[name].shape} and type {arrays[name].dtype}",
            "uint8, or floating-point numbers from 0 to 1, [images, height, width], [images,"
            " height, width, channels], or clips [clips, frames, height, width, channels] of 2"
            " frames or more",
            f"{file}:{name}",
        )
    if images.shape[-1] > _MOST_CHANNELS:
        raise UserError(
            f"{name} has shape {images.shape}: {images.shape[-1]} channels, if the last axis is"
            " that of the channels",
            f"np.moveaxis({name}, {images.ndim - 3}, -1), if the channels come first",
            f"{file}:{name}",
        )
    if kind == "f":
        images = np.ascontiguousarray(images, np.float32)
        low, high = float(images.min()), float(images.max())
        if not (low >= 0 and high <= 1):
            raise UserError(
                f"{name} has numbers from {low:g} to {high:g}",
                "floating-point numbers from 0 to 1, finite ones; or uint8",
                f"{file}:{name}",
            )
    return images


def _labels(arrays: Mapping[str, Array], name: str, count: int, file: Path) -> Array:
    labels = arrays[name]
    if labels.ndim == 2 and labels.shape[1] == 1:  # as some sets have them
        labels = labels[:, 0]
    if labels.shape != (count,) or labels.dtype.kind not in "iuU":
        raise UserError(
            f"{name} has shape {arrays[name].shape}, type {labels.dtype}, for"
            f" {counted(count, 'image')}",
            "whole numbers or names, one for each image",
            f"{file}:{name}",
        )
    return labels


def _check_alike(
    images: Mapping[str, Array], names: Mapping[str, tuple[str, str]], file: Path
) -> None:
    """UserError: the images of two splits differ in shape or type."""
    for split, of_split in images.items():
        train = images["train"]
        if of_split.shape[1:] != train.shape[1:] or of_split.dtype != train.dtype:
            raise UserError(
                f"{names[split][0]} has images of {of_split.shape[1:]} {of_split.dtype}, and"
                f" {names['train'][0]} of {train.shape[1:]} {train.dtype}",
                "images of one shape and type in all of them",
                f"{file}:{names[split][0]}",
            )


def _numbered(
    arrays: Mapping[str, Array], labels: Mapping[str, Array], file: Path
) -> tuple[list[str], dict[str, NDArray[np.int64]]]:
    """The names of the classes, and labels as their numbers."""
    present = np.unique(np.concatenate(list(labels.values())))
    if present.dtype.kind == "U":
        numbers = {split: np.searchsorted(present, of_split) for split, of_split in labels.items()}
        return present.tolist(), {split: of.astype(np.int64) for split, of in numbers.items()}
    classes = [str(name) for name in arrays["classes"]] if "classes" in arrays else []
    count = len(classes) or int(present.max()) + 1
    if int(present.min()) < 0 or int(present.max()) >= count:
        raise UserError(
            f"labels go from {present.min()} to {present.max()}"
            + (f", and classes has {count} names" if classes else ""),
            "labels from 0 to the number of classes - 1",
            f"{file}:labels",
        )
    names = classes or [str(number) for number in range(count)]
    return names, {split: of.astype(np.int64) for split, of in labels.items()}
