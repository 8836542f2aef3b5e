"""Shorten long series for drawing. The summary's numbers always use the whole series.

A picture is about 400 pixels wide. The lowest and the highest of the points that share a pixel are
kept, so that no spike is lost.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

BUCKETS = 400
MOST_DRAWN = 1e100


def drawable(y: Column) -> Column:
    """The numbers with nan in place of those that are too large for matplotlib's arithmetic."""
    return np.where(np.abs(y) <= MOST_DRAWN, y, np.nan)


def thin(x: Column, y: Column, buckets: int = BUCKETS) -> tuple[Column, Column]:
    """Select at most 2 * buckets + 2 points, in their order.

    These are the first and last point, and each bucket's lowest and highest one. A bucket without
    numbers stays a gap (nan).
    """
    count = len(y)
    if count <= 2 * buckets:
        return x, y
    edges = np.linspace(0, count, buckets + 1).astype(int)
    finite = np.isfinite(y)
    low, high = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
    indices = {0, count - 1}
    for first, last in pairwise(edges):
        indices |= {int(first + low[first:last].argmin()), int(first + high[first:last].argmax())}
    chosen = sorted(indices)
    return x[chosen], y[chosen]


def window(count: int) -> int:
    """The number of steps over which a smoothed curve averages.

    It is odd, and about a fiftieth of all steps; 1 (not smoothed) below 200 steps.
    """
    if count < 200:
        return 1
    return count // 50 | 1


def smooth(y: Column, width: int) -> Column:
    """The mean of the `width` (odd) numbers around each number; fewer numbers at the ends.

    nan is left out of the means.
    """
    finite = np.isfinite(y)
    if width <= 1 or not finite.any():
        return y
    half, steps = width // 2, np.arange(len(y))
    first, last = np.maximum(steps - half, 0), np.minimum(steps + half + 1, len(y))
    base = float(np.median(y[finite]))
    away = np.where(finite, y - base, 0.0)
    # at most a thousandth are spikes; a running sum with them would round away all other numbers
    is_spike = np.abs(away) > 1e6 * np.quantile(np.abs(away), 0.999)
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_spike, 0.0, away))))
    window_sums = sums[last] - sums[first]
    for at in np.flatnonzero(is_spike):
        window_sums[max(0, at - half) : at + half + 1] += away[at]
    counts = np.concatenate(([0], np.cumsum(finite)))
    window_counts = counts[last] - counts[first]
    mean: Column = np.full(len(y), np.nan)
    np.divide(window_sums, window_counts, out=mean, where=window_counts > 0)
    return mean + base
