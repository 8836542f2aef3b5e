"""The facts of a config's pictures that `samecurve data show` prints."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.tasks.diffusion.data.buckets import show_shape
from samecurve.tasks.diffusion.data.folders import unread_lines
from samecurve.tasks.diffusion.data.picture_set import PictureSet
from samecurve.tasks.diffusion.data.pictures import read_pixels
from samecurve.tasks.diffusion.data.samples import Samples
from samecurve.tasks.diffusion.data.scan import FolderScan
from samecurve.tasks.diffusion.data.views import Views
from samecurve.tasks.preview.about import AboutData, BucketCount, LeftOut

_NAMED = 5  # pictures of each reason


def about_pictures(
    pictures: PictureSet, views: Mapping[str, Views], *, rows_hold_pixels: bool
) -> AboutData:
    """The facts of the pictures.

    views: of the samples that are trained on, as "train", and of those held out, as "eval".
    rows_hold_pixels: whether a row shows its picture by itself; if not, it is read for the reader
    """
    return AboutData(
        lines=[
            *pictures.lines,
            _caption_line(pictures.train),
            *unread_lines(pictures.scan.folders),
        ],
        left_out=_left_out(pictures.scan),
        buckets=_buckets(pictures.train),
        beside_rows={
            split: partial(_beside_rows, each, with_pixels=not rows_hold_pixels)
            for split, each in views.items()
        },
    )


def _beside_rows(
    views: Views, ids: Ids, *, with_pixels: bool
) -> Mapping[str, Sequence[str | NDArray[Any]]]:
    """The caption, and perhaps the picture, of each sample in the first epoch."""
    captions = views.captions(ids, 0)
    dropped = views.dropped(ids, 0).tolist()
    texts = [
        f"{text} (dropped in this epoch)" if drop else text
        for text, drop in zip(captions, dropped, strict=True)
    ]
    beside: dict[str, Sequence[str | NDArray[Any]]] = {"caption": texts}
    if with_pixels:
        cuts = views.cuts(ids, 0)
        beside["picture"] = [
            read_pixels(views.samples.picture(sample)[0], cut)
            for sample, cut in zip(ids.tolist(), cuts, strict=True)
        ]
    return beside


def _buckets(samples: Samples) -> list[BucketCount]:
    pictures = [0] * len(samples.bucket_shapes)
    for _, shape in samples.pictures:
        pictures[samples.bucket_shapes.index(shape)] += 1
    return [
        BucketCount(show_shape(shape), count, size)
        for shape, count, size in zip(
            samples.bucket_shapes, pictures, samples.bucket_sizes, strict=True
        )
    ]


def _caption_line(samples: Samples) -> str:
    """How long captions are, and how many different ones there are."""
    captions = [text for picture, _ in samples.pictures for text in picture.captions]
    if not captions:
        return "no picture has a caption"
    words = np.array([len(text.split()) for text in captions])
    low, median, high = (int(n) for n in np.percentile(words, (0, 50, 100), method="lower"))
    extent = f"{low} to {high} words, {median} in the middle"
    return f"{len(captions):,} captions, {len(set(captions)):,} of them different: {extent}"


def _left_out(scan: FolderScan) -> list[LeftOut]:
    """The pictures that can't be read, by the reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for each in scan.broken:
        by_reason[each.reason].append(each.place)
    return [
        LeftOut(f"can't be read: {reason}", len(places), places[:_NAMED])
        for reason, places in by_reason.items()
    ]
