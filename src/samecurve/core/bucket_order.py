"""The order of samples that lie in buckets: all samples of a step are of one bucket.

Samples of unlike shape, such as pictures, can't be computed together, so the data sorts them into
buckets of one shape each. A bucket of n samples makes ceil(n / batch) steps of an epoch, the last
of which may be short. Which bucket's turn it is follows from (seed, epoch, step) alone, never from
the devices. As everywhere, no sample is repeated and none is dropped.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids, Order, Position, permute

_STREAM = 0x9E3779B97F4A7C15  # between the seeds of two buckets' permutations


@dataclass(frozen=True)
class EpochSteps:
    """The steps of one epoch, in their order: arrays with one number a step."""

    bucket: NDArray[np.int64]
    first: NDArray[np.int64]  # first position within the bucket's own permutation
    count: NDArray[np.int64]  # samples of the step
    consumed: NDArray[np.int64]  # samples of the epoch that earlier steps have trained on


@dataclass(frozen=True)
class BucketOrder(Order):
    """The order of a run whose samples lie in buckets. The ids of a bucket are neighbours."""

    bucket_sizes: tuple[int, ...] = ()  # samples of each bucket, in the order of their ids

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-size // self.global_batch_size) for size in self.bucket_sizes)

    @property
    def _steps_in_anchor_epoch(self) -> int:
        if self.anchor.consumed:
            raise ValueError("another batch begins within an epoch of buckets")
        return self.steps_per_epoch

    def position(self, step: int) -> Position:
        """The part of an epoch that a step owns. `first` counts the samples of earlier steps."""
        epoch, index = self._place(step)
        steps = self._steps_of(epoch)
        return Position(epoch, int(steps.consumed[index]), int(steps.count[index]))

    def steps_to(self, epochs: float) -> int:
        """The number of steps, counted from the run's first, after which this many epochs are done.

        Part of an epoch is that part of its steps, rounded up.
        """
        steps = (epochs - self.anchor.epoch) * self.steps_per_epoch
        return self.anchor.step + max(0, int(np.ceil(steps - 1e-9)))

    def ids(self, steps: range) -> list[Ids]:
        """The sample ids of each step."""
        return [self._ids_of(*self._place(step)) for step in steps]

    def _place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within the epoch."""
        since = step - self.anchor.step
        if since < 0:
            raise ValueError(f"step {step} lies before the anchor at {self.anchor.step}")
        epochs, index = divmod(since, self._steps_in_anchor_epoch)
        return self.anchor.epoch + epochs, index

    def _ids_of(self, epoch: int, index: int) -> Ids:
        steps = self._steps_of(epoch)
        bucket, first = int(steps.bucket[index]), int(steps.first[index])
        positions = np.arange(first, first + int(steps.count[index]))
        own = permute(positions, self.bucket_sizes[bucket], _stream(self.seed, bucket), epoch)
        return own + sum(self.bucket_sizes[:bucket])

    def _steps_of(self, epoch: int) -> EpochSteps:
        return _epoch_steps(self.bucket_sizes, self.global_batch_size, self.seed, epoch)


def _stream(seed: int, bucket: int) -> int:
    """The seed of a bucket's own permutation; bucket -1 stands for the order of the steps."""
    return (seed + (bucket + 2) * _STREAM) % 2**64


@lru_cache(maxsize=4)
def _epoch_steps(sizes: tuple[int, ...], batch: int, seed: int, epoch: int) -> EpochSteps:
    """The steps of an epoch: those of all buckets, in a keyed order."""
    in_bucket = np.array([-(-size // batch) for size in sizes], np.int64)
    total = int(in_bucket.sum())
    bucket = np.repeat(np.arange(len(sizes)), in_bucket)
    first = (np.arange(total) - np.repeat(np.cumsum(in_bucket) - in_bucket, in_bucket)) * batch
    count = np.minimum(batch, np.array(sizes, np.int64)[bucket] - first)
    order = permute(np.arange(total), total, _stream(seed, -1), epoch)
    count = count[order]
    return EpochSteps(bucket[order], first[order], count, np.cumsum(count) - count)
