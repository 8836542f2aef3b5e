"""The promise, on five pages that import nothing else of ours.

Read them in this order: data_order.py (which samples a step has), microbatches.py (which device
computes which of them), sample_keys.py (what their random numbers follow), this page (what a loss
is) and step_arithmetic.py (how sums become an update). tests/test_promise.py holds the whole
program to them.

A loss is a sum and a weight. Sums and weights are added over microbatches and devices, and divided
once, at the end of a step (step_arithmetic.py). A mean of means is wrong as soon as two
microbatches have different weights, as texts of different length have, or the short last step of an
epoch.
"""

from typing import Any, NamedTuple

# the remedy where a loss is a mean
RETURN_MEAN = (
    'return Mean(sum, weight): sum is the loss added over what was counted (reduction="sum";'
    " a mean times the weight), weight is how much that was (len(x) samples,"
    " (labels != -100).sum() tokens). Both are added over all devices and divided once: a mean of"
    " means would depend on the number of devices"
)
NEGATIVE_WEIGHT_REMEDY = (
    "Mean(sum, weight): the weight is how much was counted, never below 0; to maximise a number,"
    " put a minus before its sum"
)


class Mean(NamedTuple):
    """A sum and the weight by which it will be divided.

    sum: the loss, added over what was counted: a number, or a tensor with one number.
    weight: how much was counted (tokens, samples): a number, or a tensor on the sum's device.
    """

    sum: Any
    weight: Any

    def __add__(self, other: object) -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.sum + other.sum, self.weight + other.weight)
