"""Which cut and which caption a sample has in an epoch: pure functions of the seed, the picture's
content, and how often it was read before.

Pixels that a model trains on directly are drawn anew at every reading. What a frozen encoder has
made is kept in a few variants, and reading n takes variant n mod variants: both the cut and the
words of the caption. Whether the caption is dropped is drawn anew at every reading in either case.
Held-out pictures are not augmented: the middle, the first caption as it stands.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Ids
from samecurve_products.pictures.diffusion.data.buckets import Shape
from samecurve_products.pictures.diffusion.data.captions import caption_of, is_dropped
from samecurve_products.pictures.diffusion.data.pictures import (
    Cut,
    center_cut,
    encoding_key,
    random_cut,
)
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.scan import Picture
from samecurve_products.pictures.diffusion.sections import DiffusionData


@dataclass(frozen=True)
class Encoding:
    """A cut that a frozen encoder makes something of. key: equal for equal pixels"""

    picture: Picture
    cut: Cut
    key: str


@dataclass(frozen=True, kw_only=True)
class Views:
    """The cuts and captions of samples.

    seed: of what is drawn; the cache of encodings is used again as long as it stays.
    augmented: False: of held-out samples. variants: None: every reading is drawn anew
    """

    samples: Samples
    data: DiffusionData
    seed: int = 0
    augmented: bool = True
    variants: int | None = None

    def variants_of(self, ids: Ids, epoch: int) -> NDArray[np.int64]:
        """The number by which each sample's cut and caption are drawn."""
        readings = self.samples.readings(ids, epoch)
        return readings if self.variants is None else readings % self.variants

    def cuts(self, ids: Ids, epoch: int) -> list[Cut]:
        """The cut of each sample."""
        numbers = self.variants_of(ids, epoch).tolist()
        return [
            self._cut(*self.samples.picture(sample), number)
            for sample, number in zip(ids.tolist(), numbers, strict=True)
        ]

    def captions(self, ids: Ids, epoch: int) -> list[str]:
        """The caption of each sample, whether it is dropped or not."""
        numbers = self.variants_of(ids, epoch).tolist()
        return [
            self._caption(self.samples.picture(sample)[0], number)
            for sample, number in zip(ids.tolist(), numbers, strict=True)
        ]

    def dropped(self, ids: Ids, epoch: int) -> NDArray[np.bool_]:
        """Which samples are trained without their caption."""
        readings = self.samples.readings(ids, epoch).tolist()
        drops = [
            is_dropped(
                self.data.captions,
                self._draws(self.samples.picture(sample)[0], "dropped caption", reading),
            )
            for sample, reading in zip(ids.tolist(), readings, strict=True)
        ]
        return np.array(drops, np.bool_)

    def encodings(self) -> list[Encoding]:
        """All cuts that samples have in any epoch, each once, in the order of the ids.

        Only where the variants are counted, or nothing is augmented.
        """
        return list({each.key: each for each in self._all_encodings()}.values())

    def all_captions(self) -> list[str]:
        """All captions that samples have in any epoch, each once; "" is one if it may be dropped.

        Only where the variants are counted, or nothing is augmented.
        """
        captions = {
            self._caption(picture, number): None
            for picture, _ in self.samples.pictures
            for number in range(self._count)
        }
        if self.augmented and self.data.captions.dropout:
            captions[""] = None
        return list(captions)

    def encoding_of(self, sample: int, epoch: int) -> Encoding:
        """What the encoder is given of a sample."""
        (cut,) = self.cuts(np.array([sample]), epoch)
        picture, _ = self.samples.picture(sample)
        return Encoding(picture, cut, encoding_key(picture, cut))

    def _all_encodings(self) -> Iterator[Encoding]:
        for picture, shape in self.samples.pictures:
            for number in range(self._count):
                cut = self._cut(picture, shape, number)
                yield Encoding(picture, cut, encoding_key(picture, cut))

    @property
    def _count(self) -> int:
        """Variants of a picture. ValueError: they are not counted."""
        if not self.augmented:
            return 1
        if self.variants is None:
            raise ValueError("every reading is drawn anew")
        return self.variants

    def _cut(self, picture: Picture, shape: Shape, number: int) -> Cut:
        random = self._draws(picture, "cut", number)
        if random is None:
            return center_cut(picture, shape)
        crop = self.data.crop == "random"
        return random_cut(picture, shape, random, crop=crop, flip=self.data.flip)

    def _caption(self, picture: Picture, number: int) -> str:
        random = self._draws(picture, "caption", number)
        return caption_of(picture, self.data.captions, random)

    def _draws(self, picture: Picture, purpose: str, number: int) -> np.random.Generator | None:
        return picture.draws(purpose, number, self.seed) if self.augmented else None
