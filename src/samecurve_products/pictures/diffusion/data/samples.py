"""Samples of pictures by id, those of one bucket next to each other, so that a step has one shape.

A picture with r repeats is r samples. An id is a place, and changes when pictures are added; what
is drawn for a sample follows from its picture's content, and stays.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Ids
from samecurve_products.pictures.diffusion.data.buckets import Buckets, Shape
from samecurve_products.pictures.diffusion.data.scan import Picture

_FORMAT = 1  # of a sample: another number is other data


class Samples:
    """Samples by id: ids count through the first bucket, then the second, and so on.

    bucket_shapes, bucket_sizes: shape, and number of samples, of each bucket that has any.
    pictures: each once, in the order of the ids, with its bucket's shape
    """

    def __init__(self, pictures: Sequence[Picture], buckets: Buckets, *, repeated: bool) -> None:
        """repeated: whether a picture is several samples, as its folder says"""
        by_shape: dict[Shape, list[Picture]] = {shape: [] for shape in buckets.shapes}
        for picture in pictures:
            by_shape[buckets.shape_of(picture.width, picture.height)].append(picture)
        filled = {shape: of_shape for shape, of_shape in by_shape.items() if of_shape}
        self.pictures = [(each, shape) for shape, of_shape in filled.items() for each in of_shape]
        self.bucket_shapes = tuple(filled)
        self.bucket_sizes = tuple(
            sum(each.repeats if repeated else 1 for each in of_shape)
            for of_shape in filled.values()
        )
        self._ends = np.cumsum(self.bucket_sizes)
        repeats = [each.repeats if repeated else 1 for each, _ in self.pictures]
        self._repeats = np.array(repeats, np.int64)
        self._picture: NDArray[np.int64] = np.repeat(np.arange(len(repeats)), repeats)
        first = np.cumsum([0, *repeats])[:-1]
        self._repeat = np.arange(len(self._picture)) - np.repeat(first, repeats)

    def __len__(self) -> int:
        return len(self._picture)

    def picture(self, sample: int) -> tuple[Picture, Shape]:
        """The picture of a sample, and its bucket's shape."""
        return self.pictures[int(self._picture[sample])]

    def shape(self, ids: Ids) -> Shape:
        """The one shape of these samples. ValueError: they are of several buckets."""
        buckets = np.searchsorted(self._ends, ids, "right")
        if (buckets != buckets[0]).any():
            raise ValueError(f"samples {ids[:8].tolist()} are of several buckets")
        return self.bucket_shapes[buckets[0]]

    def readings(self, ids: Ids, epoch: int) -> NDArray[np.int64]:
        """How many times each sample's picture was read before it, over all epochs."""
        pictures = self._picture[ids]
        readings: NDArray[np.int64] = epoch * self._repeats[pictures] + self._repeat[ids]
        return readings

    def weights(self, ids: Ids) -> NDArray[np.float32]:
        """What each sample counts in the loss."""
        return np.array([self.picture(sample)[0].weight for sample in ids.tolist()], np.float32)

    def fingerprint(self) -> str:
        """A digest of what the samples are made from, wherever their files lie."""
        digest = hashlib.sha256(str(_FORMAT).encode())
        for (picture, shape), repeats in zip(self.pictures, self._repeats.tolist(), strict=True):
            mask = None if picture.mask is None else picture.mask.facts.sha256
            words = [picture.captions, picture.trigger]
            made_from = [picture.sha256, mask, shape, words, picture.weight, repeats]
            digest.update(json.dumps(made_from).encode())
        return digest.hexdigest()[:24]
