"""Long series made fit to be drawn: what the eye is shown, never what is counted.

A picture is some 400 pixels wide. Of the points that share a pixel the lowest and the highest are
kept, so that no spike is lost.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

BUCKETS = 400


def thin(x: Column, y: Column, buckets: int = BUCKETS) -> tuple[Column, Column]:
    """At most 2 * buckets + 2 points in their order: first, last, and each bucket's lowest and
    highest. A bucket without any number stays a gap (nan).
    """
    count = len(y)
    if count <= 2 * buckets:
        return x, y
    edges = np.linspace(0, count, buckets + 1).astype(int)
    finite = np.isfinite(y)
    low, high = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
    kept = {0, count - 1}
    for first, last in pairwise(edges):
        kept |= {int(first + low[first:last].argmin()), int(first + high[first:last].argmax())}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def window(count: int) -> int:
    """How many steps a smoothed curve takes together: a fiftieth of all, odd; 1 (as it is) below
    200 steps.
    """
    return 1 if count < 200 else count // 50 | 1


def smooth(y: Column, width: int) -> Column:
    """The mean of the `width` (odd) numbers around each, of as many as there are at the ends.

    What is no number counts for nothing.
    """
    finite = np.isfinite(y)
    if width <= 1 or not finite.any():
        return y
    half, ends = width // 2, np.arange(len(y))
    first, last = np.maximum(ends - half, 0), np.minimum(ends + half + 1, len(y))
    base = float(np.median(y[finite]))
    away = np.where(finite, y - base, 0.0)
    spikes = np.abs(away) > 1e6 * np.quantile(
        np.abs(away), 0.999
    )  # at most a thousandth; in a running sum they would cost all others their digits
    sums = np.concatenate(([0.0], np.cumsum(np.where(spikes, 0.0, away))))
    total = sums[last] - sums[first]
    for at in np.flatnonzero(spikes):
        total[max(0, at - half) : at + half + 1] += away[at]
    counts = np.concatenate(([0], np.cumsum(finite)))
    given = counts[last] - counts[first]
    found: Column = np.full(len(y), np.nan)
    np.divide(total, given, out=found, where=given > 0)
    return found + base
