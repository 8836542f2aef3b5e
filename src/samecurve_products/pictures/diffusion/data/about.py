"""The facts of a config's pictures that `samecurve data show` prints."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from samecurve.seam import Ids
from samecurve_products.pictures.diffusion.data.buckets import show_shape
from samecurve_products.pictures.diffusion.data.folders import unread_lines
from samecurve_products.pictures.diffusion.data.picture_set import PictureSet
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.scan import FolderScan
from samecurve_products.pictures.diffusion.data.source import PixelRows
from samecurve_products.pictures.diffusion.sections import DiffusionData
from samecurve_products.preview.about import AboutData, BucketCount, LeftOut

_NAMED = 5  # pictures of each reason
_EMPTY = "(trained without a caption)"


def about_pictures(
    pictures: PictureSet, data: DiffusionData, *, variants: int | None = None
) -> AboutData:
    """The facts of the pictures.

    variants: of a model of latents: its rows are shown as the pixels that they are made from;
        None: rows hold pixels
    """
    train = PixelRows(pictures.train, data, variants=variants)
    sources = {"train": train}
    if pictures.held_out is not None:
        sources["eval"] = PixelRows(pictures.held_out, data, augmented=False)
    return AboutData(
        lines=[
            *pictures.lines,
            _caption_line(pictures.train),
            *unread_lines(pictures.scan.folders),
        ],
        left_out=_left_out(pictures.scan),
        buckets=_buckets(pictures.train),
        beside_rows={split: partial(_captions, rows) for split, rows in sources.items()},
        sources={} if variants is None else sources,
    )


def _captions(rows: PixelRows, ids: Ids) -> Mapping[str, Sequence[str]]:
    """The caption of each sample in the first epoch."""
    return {"caption": [text or _EMPTY for text in rows.captions(ids)]}


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
    return f"captions: {len(captions):,}, of which {len(set(captions)):,} are different; {extent}"


def _left_out(scan: FolderScan) -> list[LeftOut]:
    """The pictures that can't be read, by the reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for each in scan.broken:
        by_reason[each.reason].append(each.place)
    return [
        LeftOut(f"can't be read: {reason}", len(places), places[:_NAMED])
        for reason, places in by_reason.items()
    ]
