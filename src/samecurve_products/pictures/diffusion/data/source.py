"""Rows of pixels by id, for models that are trained on pixels themselves."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Ids
from samecurve_products.pictures.diffusion.data.pictures import read_mask, read_pixels
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.views import Views
from samecurve_products.pictures.diffusion.sections import DiffusionData


class PixelRows:
    """A source of pictures. Ids that are read at once are of one bucket.

    Rows: pixels uint8 [3, height, width]; weight float32, what the sample counts; with data.masks
    mask float32 [height, width], what each pixel counts, data.unmasked_weight included.

    augmented: False: of held-out samples. seed: of crops, flips and captions. variants: of each
    picture; None: every reading is drawn anew
    """

    def __init__(
        self,
        samples: Samples,
        data: DiffusionData,
        *,
        augmented: bool = True,
        seed: int = 0,
        variants: int | None = None,
    ) -> None:
        self.bucket_sizes = samples.bucket_sizes
        self._samples, self._data = samples, data
        self._views = Views(
            samples=samples, data=data, seed=seed, augmented=augmented, variants=variants
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, ids: Ids, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """Rows of an epoch. ValueError: the samples are of several buckets."""
        self._samples.shape(ids)
        cuts = self._views.cuts(ids, epoch)
        pictures = [self._samples.picture(sample)[0] for sample in ids.tolist()]
        rows: dict[str, NDArray[Any]] = {
            "pixels": np.stack([read_pixels(*each) for each in zip(pictures, cuts, strict=True)]),
            "weight": self._samples.weights(ids),
        }
        if self._data.masks:
            rest = self._data.unmasked_weight
            masks = [read_mask(*each, rest) for each in zip(pictures, cuts, strict=True)]
            rows["mask"] = np.stack(masks)
        return rows

    def captions(self, ids: Ids, epoch: int = 0) -> list[str]:
        """The captions of samples in an epoch; "" where one is dropped."""
        captions = self._views.captions(ids, epoch)
        dropped = self._views.dropped(ids, epoch).tolist()
        return ["" if drop else text for text, drop in zip(captions, dropped, strict=True)]

    def fingerprint(self) -> str:
        """A digest of what the rows are made from."""
        return self._samples.fingerprint()
