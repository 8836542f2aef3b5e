"""What randomness of one sample is keyed by: a pure function of (seed, epoch, sample id).

A mask or an augmentation drawn from such a key follows the sample: it is the same on whatever
device, in whatever microbatch of whatever batch the sample is, under either engine.
"""

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def row_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """One well-mixed key in 0..2**63-1 for each sample id, in the shape of `ids`; masks keyed by it
    follow the sample, not the device.

    A SplitMix64 stream for each (seed, epoch), entered at the sample's id: mix(start + id * step),
    its top 63 bits.
    """
    start = mix(mix(_word(seed) + _STEP) + _word(epoch) * _STEP)
    mixed: NDArray[np.uint64] = mix(start + ids.astype(np.uint64) * _STEP)
    return (mixed >> np.uint64(1)).astype(np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, a bijection.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def _word(value: int) -> NDArray[np.uint64]:
    """As an array, whose arithmetic wraps silently where a scalar's warns."""
    return np.array([value % 2**64], np.uint64)
