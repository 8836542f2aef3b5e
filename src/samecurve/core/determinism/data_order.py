"""Which samples a step trains on: a pure function of (seed, epoch, position).

The stream of an epoch is a keyed permutation of 0..samples-1, computed where it is asked for: no
array of indices is held, any step can be entered at once, and the number of devices is nowhere in
it. A step owns positions [j*batch, min((j+1)*batch, samples)) of its epoch; the tail is short, no
sample is repeated, none dropped.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class Anchor:
    """Where the present batch size took over."""

    step: int = 0  # steps before it
    epoch: int = 0
    consumed: int = 0  # samples of that epoch before it


@dataclass(frozen=True)
class Position:
    """Where a step starts."""

    epoch: int
    first: int  # position in the epoch
    count: int  # samples


@dataclass(frozen=True)
class Order:
    """The order of a run's samples."""

    samples: int  # in the data set
    batch: int  # samples a step
    seed: int  # of the permutation
    anchor: Anchor = Anchor()  # of a batch changed under way

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def _steps_in_anchor_epoch(self) -> int:
        return -(-(self.samples - self.anchor.consumed) // self.batch)

    def position(self, step: int) -> Position:
        """step: counted from 0, at least anchor.step."""
        since = step - self.anchor.step
        if since < 0:
            raise ValueError(f"step {step} lies before the anchor at {self.anchor.step}")
        if since < self._steps_in_anchor_epoch:
            epoch, first = self.anchor.epoch, self.anchor.consumed + since * self.batch
        else:
            epochs, index = divmod(since - self._steps_in_anchor_epoch, self.steps_per_epoch)
            epoch, first = self.anchor.epoch + 1 + epochs, index * self.batch
        return Position(epoch, first, min(self.batch, self.samples - first))

    def epoch_of(self, step: int) -> int:
        """step: counted from 0; one before the anchor is taken for that."""
        since = step - self.anchor.step - self._steps_in_anchor_epoch
        return self.anchor.epoch + max(0, 1 + since // self.steps_per_epoch)

    def steps_to(self, epochs: float) -> int:
        """Steps until so many epochs are done; a part of an epoch is rounded up to whole steps."""
        epoch, part = divmod(epochs, 1.0)
        target = math.ceil(part * self.samples - 1e-9)
        anchor = self.anchor
        if (epoch, target) <= (anchor.epoch, anchor.consumed):
            return anchor.step
        if epoch == anchor.epoch:
            return anchor.step + -(-(target - anchor.consumed) // self.batch)
        between = (int(epoch) - anchor.epoch - 1) * self.steps_per_epoch
        return anchor.step + self._steps_in_anchor_epoch + between + -(-target // self.batch)

    def ids(self, steps: range) -> list[Ids]:
        """The sample ids of each step, computed together: called for many steps at once, it costs
        some 85 ns an id.
        """
        positions = [self.position(step) for step in steps]
        by_step: list[Ids] = []
        for epoch in dict.fromkeys(position.epoch for position in positions):
            in_epoch = [position for position in positions if position.epoch == epoch]
            begin, last = in_epoch[0].first, in_epoch[-1]
            span = np.arange(begin, last.first + last.count)
            ids = permute(span, self.samples, self.seed, epoch)
            by_step += [ids[p.first - begin :][: p.count] for p in in_epoch]
        return by_step


def by_length(ids: Ids, lengths: NDArray[np.int64], micro: int) -> Ids:
    """The samples of one step, laid so that those of a microbatch are about equally long.

    Which samples a step has stays as it was, so its loss and gradients do too, but for rounding. A
    long microbatch is followed by a short one, and such pairs are spread over the step as van der
    Corput's sequence is over an interval, so that every run of neighbours, however many devices
    share the step, has its part of both. The microbatch at the end may be smaller: it has the
    shortest samples.

    lengths: of these samples. micro: samples of a microbatch.
    """
    order = np.argsort(-lengths, kind="stable")
    full = len(ids) // micro
    spread = order[: full * micro].reshape(full, micro)[_in_pairs(full)]
    laid: Ids = ids[np.concatenate([spread.reshape(-1), order[full * micro :]])]
    return laid


def _in_pairs(count: int) -> NDArray[np.int64]:
    """0..count-1 as pairs of one from the beginning and one from the end."""
    half = (count + 1) // 2
    number, place, bit = np.arange(half), np.zeros(half), 0.5
    while number.any():
        place += bit * (number % 2)
        number, bit = number // 2, bit / 2
    first = np.argsort(np.argsort(place))
    pairs = np.stack([first, count - 1 - first], 1).reshape(-1)
    once: Ids = pairs[np.diff(pairs, prepend=-1) != 0]  # the middle one
    return once


def permute(positions: Ids, size: int, seed: int, epoch: int) -> Ids:
    """Positions of an epoch's stream -> sample ids: a bijection of 0..size-1.

    A Feistel network over the next power of two, its two halves unequal by a bit where the power is
    odd, so that the domain stays under 2*size; what falls outside is sent through again (cycle
    walking). Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    bits = max(2, (size - 1).bit_length())
    keys = (
        np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    )
    ids = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(ids >= size)
    while outside.size:
        ids[outside] = _feistel(ids[outside], bits, keys)
        outside = outside[ids[outside] >= size]
    return ids.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (_mix(low ^ first) & high_mask)
        low = low ^ (_mix(high ^ second) & low_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
