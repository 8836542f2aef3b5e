"""Handwritten digits, 8 x 8 pixels: the data set that scikit-learn brings with it.

A fifth of the 1,797 images is for the test, the same ones always.
"""

from importlib import metadata

import numpy as np

from samecurve.seam import UserError, install_command
from samecurve_products.pictures.vision.data.image_sets import (
    ImageRows,
    ImageSets,
    image_sets,
    split_ids,
)

_TEST = 0.2  # share of all images
_WHITEST = 16  # the largest number of a pixel in scikit-learn's arrays


def stamp_digits() -> object:
    """What the images follow from. UserError: scikit-learn is not installed."""
    _check_installed()
    return ["digits", metadata.version("scikit-learn")]


def read_digits(validation: float) -> ImageSets:
    """The digits. validation: the share of the images to train on that is held out.

    UserError: scikit-learn is not installed.
    """
    _check_installed()
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / _WHITEST)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    rest, test = split_ids(len(labels), _TEST)
    train, held_out = split_ids(len(rest), validation)
    ids = {"train": rest[train], "validation": rest[held_out], "test": test}
    parts = {name: ImageRows(pixels, labels, some) for name, some in ids.items() if len(some)}
    return image_sets(parts, [str(digit) for digit in range(10)], ["digits of scikit-learn"])


def _check_installed() -> None:
    try:
        metadata.version("scikit-learn")
    except metadata.PackageNotFoundError:
        raise UserError(
            "the data are digits where no -d names a folder of pictures, and digits need"
            " scikit-learn, which is not installed",
            f"-d DIR names your pictures; for the digits {install_command('vision')}",
            "data.source",
        ) from None
