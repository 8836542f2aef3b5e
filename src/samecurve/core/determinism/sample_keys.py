"""Keys for the random numbers of one sample: a pure function of (seed, epoch, sample id).

A mask or an augmentation drawn from such a key follows the sample. It is the same on every device,
in every microbatch of every batch, and under both engines.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HELD_OUT = -1  # the epoch in an evaluation's keys (held-out data is read with epoch 0)
_SAMPLE_STREAM = 0x73616D65  # keeps sample_rng() apart from a user's own default_rng((seed, id))
_PHASE = 0xD1B54A32D192ED03  # from the seed of one phase of a step to that of the next
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment, not a step of the run
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # factors of SplitMix64


@dataclass(eq=False)  # not frozen, which is slower: every microbatch of every model makes one
class RowKeys:
    """Keys of a microbatch's rows, computed when first asked for: most models draw nothing.

    epoch: HELD_OUT in an evaluation.
    step: step of the run; 0 in an evaluation, which draws the same numbers each time.
    ids: sample ids, one for each row.
    """

    seed: int
    epoch: int
    step: int
    ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def of_phase(self, number: int) -> "RowKeys":
        """Keys for one of several updates in a step (a GAN's critic and generator): each phase
        draws numbers of its own.
        """
        return replace(self, seed=self.seed + number * _PHASE) if number else self

    @cached_property
    def values(self) -> NDArray[np.int64]:
        """Keys, one for each row."""
        return row_keys(self.seed, self.epoch, self.ids)

    @cached_property
    def step_key(self) -> int:
        """A key for numbers that belong to no sample: the same in every microbatch of the step."""
        return step_key(self.seed, self.epoch, self.step)


def sample_rng(sample_id: int, epoch: int = 0, *, seed: int = 0) -> np.random.Generator:
    """A generator for one sample in one epoch: for an augmentation that follows the sample.

    A pure function: it gives the same numbers in every process, on every device, and in a resumed
    run.
    sample_id, epoch: at least 0.
    seed: another seed gives another stream. It is not the run's train.seed, unless you pass that.
    """
    return np.random.default_rng((_SAMPLE_STREAM, seed, epoch, sample_id))


def row_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Well-mixed keys in 0..2**63-1, one for each sample id, in the shape of `ids`.

    Each (seed, epoch) has a SplitMix64 stream. The key of a sample is number `id` of that stream,
    mix(start + id * _INCREMENT), of which the top 63 bits are kept.
    """
    start = mix(mix(_word(seed) + _INCREMENT) + _word(epoch) * _INCREMENT)
    mixed: NDArray[np.uint64] = mix(start + ids.astype(np.uint64) * _INCREMENT)
    return (mixed >> np.uint64(1)).astype(np.int64)


def step_key(seed: int, epoch: int, step: int) -> int:
    """A well-mixed key in 0..2**63-1 for a step of the run, from a stream of its own."""
    start = mix(mix(_word(seed) + _INCREMENT) ^ _word(epoch))
    mixed = mix(start ^ mix(_word(step) + _INCREMENT)) >> np.uint64(1)
    return int(mixed[0])


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: a bijection of 64-bit words.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def _word(value: int) -> NDArray[np.uint64]:
    """An array of one 64-bit word: on overflow numpy's arrays wrap silently, its scalars warn."""
    return np.array([value % 2**64], np.uint64)
