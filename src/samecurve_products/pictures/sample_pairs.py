"""Pairs of samples that follow from the order of an epoch, for recipes that mix two samples.

Positions 2j and 2j+1 of an epoch's stream are a pair: a pure function of (seed, epoch, position),
so devices and microbatches have no say. Neighbours of a stream are nearly always read at once.
"""

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import permute, round_keys
from samecurve.core.determinism.sample_keys import mix
from samecurve.seam import Ids


def paired_ids(ids: Ids, size: int, seed: int, epoch: int) -> Ids:
    """The other sample of each sample's pair. The last one of an odd number has itself.

    size: samples of an epoch
    """
    others = positions_of(ids, size, seed, epoch) ^ 1
    return permute(np.minimum(others, size - 1), size, seed, epoch)


def positions_of(ids: Ids, size: int, seed: int, epoch: int) -> Ids:
    """The positions of sample ids in an epoch's stream: the inverse of permute()."""
    bits = max(2, (size - 1).bit_length())
    keys = round_keys(seed, epoch)
    positions = _inverse(ids.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(positions >= size)
    while outside.size:
        positions[outside] = _inverse(positions[outside], bits, keys)
        outside = outside[positions[outside] >= size]
    return positions.astype(np.int64)


def _inverse(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The network of permute(), backwards: the last round first."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for first, second in zip(keys[-2::-2], keys[::-2], strict=True):
        low = low ^ (mix(high ^ second) & low_mask)
        high = high ^ (mix(low ^ first) & high_mask)
    return (high << low_bits) | low
