"""Pictures of held-out images that a model answers wrongly, the surest answers first.

No engine is imported here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Picture, Source, counted
from samecurve_products.pictures.vision.captions import with_text

SHOWN = 12  # pictures at most
TOGETHER = 32  # images that the model is given at once
_LOOKED_AT = 512  # held-out images at most, spread over all

Answer = Callable[[dict[str, NDArray[Any]]], NDArray[Any]]  # rows -> chances [rows, classes]


def wrong_answers(
    source: Source | None, answer: Answer, classes: Sequence[str]
) -> list[str] | list[Picture]:
    """Pictures of images whose answer is wrong, or a text that says that there are none.

    answer: is called equally often on every rank
    """
    if source is None:
        return ["no images are held out, so none is answered"]
    ids = np.unique(np.linspace(0, len(source) - 1, min(len(source), _LOOKED_AT)).astype(np.int64))
    wrong: list[tuple[float, int, int, int]] = []
    for first in range(0, len(ids), TOGETHER):
        some = ids[first : first + TOGETHER]
        rows = dict(source[some])
        chances, labels = answer(rows), rows["labels"]
        answers = chances.argmax(-1)
        for row in np.flatnonzero(answers != labels).tolist():
            given = int(answers[row])
            wrong.append((float(chances[row, given]), int(some[row]), int(labels[row]), given))
    if not wrong:
        return [f"no wrong answer among {counted(len(ids), 'held-out image')}"]
    wrong.sort(key=lambda each: (-each[0], each[1]))
    pictures: list[Picture] = []
    for chance, sample, label, given in wrong[:SHOWN]:
        pixels = source[np.array([sample])]["pixels"][0]
        lines = [classes[label], f"answer {chance:.0%}: {classes[given]}"]
        pictures.append(with_text(pixels, lines))
    return pictures
