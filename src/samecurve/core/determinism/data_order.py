"""The order of samples: which ones a step trains on, a pure function of (seed, epoch, position).

The stream of an epoch is a permutation of 0..samples-1, keyed by (seed, epoch). Each position is
computed when it is needed: no array of indices is held, and a run can begin at any step. The stream
does not depend on the number of devices. Step j of an epoch owns positions
[j*batch, min((j+1)*batch, samples)), where batch is the global batch size. The last step of an
epoch may be short: no sample is repeated, none is dropped.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.sample_keys import mix

Ids = NDArray[np.int64]

_ROUNDS = 8  # rounds of the Feistel network, see permute()


@dataclass(frozen=True)
class Anchor:
    """Where in the run this batch size began: at a resume with --new-batch, else at step 0."""

    step: int = 0  # the first step with this batch size, counted from 0
    epoch: int = 0  # the epoch of that step
    consumed: int = 0  # samples of that epoch that earlier steps have trained on


@dataclass(frozen=True)
class Position:
    """The interval of one epoch's stream that a step owns."""

    epoch: int
    first: int  # the first position of the interval
    count: int  # the number of samples


@dataclass(frozen=True)
class Order:
    """The order of a run's samples."""

    samples: int  # in the data set
    global_batch_size: int  # samples of a full step, over all devices
    seed: int  # of the permutation
    anchor: Anchor = Anchor()  # where this batch size began

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch_size)

    @property
    def _steps_in_anchor_epoch(self) -> int:
        return -(-(self.samples - self.anchor.consumed) // self.global_batch_size)

    def position(self, step: int) -> Position:
        """The interval that a step owns. step: counted from 0, at least anchor.step."""
        since = step - self.anchor.step
        if since < 0:
            raise ValueError(f"step {step} lies before the anchor at {self.anchor.step}")
        if since < self._steps_in_anchor_epoch:
            epoch, first = self.anchor.epoch, self.anchor.consumed + since * self.global_batch_size
        else:
            epochs, index = divmod(since - self._steps_in_anchor_epoch, self.steps_per_epoch)
            epoch, first = self.anchor.epoch + 1 + epochs, index * self.global_batch_size
        return Position(epoch, first, min(self.global_batch_size, self.samples - first))

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, counted from 0; for a step before the anchor, the anchor's epoch."""
        since = step - self.anchor.step - self._steps_in_anchor_epoch
        return self.anchor.epoch + max(0, 1 + since // self.steps_per_epoch)

    def steps_to(self, epochs: float) -> int:
        """The number of steps, counted from the run's first, after which this many epochs are done.

        Part of an epoch is rounded up to whole steps. Never less than anchor.step.
        """
        epoch, part = divmod(epochs, 1.0)
        target = math.ceil(part * self.samples - 1e-9)  # samples of the last, partial epoch
        anchor = self.anchor
        if (epoch, target) <= (anchor.epoch, anchor.consumed):
            return anchor.step
        if epoch == anchor.epoch:
            return anchor.step + -(-(target - anchor.consumed) // self.global_batch_size)
        between = (int(epoch) - anchor.epoch - 1) * self.steps_per_epoch
        return (
            anchor.step
            + self._steps_in_anchor_epoch
            + between
            + -(-target // self.global_batch_size)
        )

    def ids(self, steps: range) -> list[Ids]:
        """The sample ids of each step. Ask for many steps at once: that costs some 85 ns an id; one
        call for each step costs far more.
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


def by_length(ids: Ids, lengths: NDArray[np.int64], micro_batch_size: int) -> Ids:
    """Reorder one step's samples so that those of a microbatch are about equally long.

    The step keeps its samples, so its loss and gradient stay the same up to rounding. A microbatch
    of long samples is followed by one of short samples. These pairs are spread over the step like
    van der Corput's sequence over an interval, so that there are long and short ones among any
    few neighbouring microbatches, however many devices share the step. The last microbatch, which
    may be smaller, has the shortest samples.

    lengths: the length of each sample in `ids`, in any unit.
    """
    order = np.argsort(-lengths, kind="stable")
    full = len(ids) // micro_batch_size
    spread = order[: full * micro_batch_size].reshape(full, micro_batch_size)[_in_pairs(full)]
    laid: Ids = ids[np.concatenate([spread.reshape(-1), order[full * micro_batch_size :]])]
    return laid


def _in_pairs(count: int) -> NDArray[np.int64]:
    """0..count-1 as pairs (i, count-1-i), one after the other; the i in van der Corput's order."""
    half = (count + 1) // 2
    number, place, bit = np.arange(half), np.zeros(half), 0.5
    while number.any():
        place += bit * (number % 2)
        number, bit = number // 2, bit / 2
    first = np.argsort(np.argsort(place))
    pairs = np.stack([first, count - 1 - first], 1).reshape(-1)
    once: Ids = pairs[np.diff(pairs, prepend=-1) != 0]  # an odd count has its middle twice
    return once


def permute(positions: Ids, size: int, seed: int, epoch: int) -> Ids:
    """Sample ids at these positions of an epoch's stream: a bijection of 0..size-1.

    A Feistel network over 0..2**bits-1, where 2**bits is the next power of two. If `bits` is odd,
    one half has a bit more than the other. So the domain stays below 2*size. An id that is
    not below `size` is sent through the network again (cycle walking).
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    bits = max(2, (size - 1).bit_length())
    keys = round_keys(seed, epoch)
    ids = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(ids >= size)
    while outside.size:
        ids[outside] = _feistel(ids[outside], bits, keys)
        outside = outside[ids[outside] >= size]
    return ids.astype(np.int64)


def round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """The keys of the network's rounds, in the order in which permute() uses them."""
    state = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)
    return state.astype(np.uint64, copy=False)  # numpy's types leave 32 bits open


def _feistel(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ (mix(low ^ first) & high_mask)
        low = low ^ (mix(high ^ second) & low_mask)
    return (high << low_bits) | low
