"""A loss is a sum and a weight.

Both are added over micro-batches and devices, and divided once.

A mean of means is wrong as soon as two micro-batches have unequal weights (ragged text, a short
tail).
"""

from typing import Any, NamedTuple

# the remedy where a weight is below 0
NEGATIVE = (
    "Mean(sum, weight): the weight is how much was counted, never below 0; what is to be made large"
    " has a minus before its sum"
)


class Mean(NamedTuple):
    """sum: the loss added over what was counted.

    weight: how much was counted (tokens, samples), same device as sum or a number.
    """

    sum: Any
    weight: Any

    def __add__(self, other: object) -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.sum + other.sum, self.weight + other.weight)


def nominal_weight(batch: int, per_sample: int) -> float:
    """The power of two next to a full step's weight, by which sums of microbatches are scaled
    before they are added.

    It keeps sums within f16's range and, as a power of two, changes no digit. batch: samples a
    step; per_sample: weight of one.
    """
    return float(2 ** max(0, (batch * per_sample - 1).bit_length()))
