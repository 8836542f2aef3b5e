"""train.exact: auto, on CPU ranks: exact where a microbatch is work enough to pay for its calls.

That is 75 MFLOP for each array of the model, 1 GFLOP for each convolution and 3,000 FLOP for each
trained number; three times as much where the model is compiled. A step in eight microbatches then
took less than 1.05 times as long as at once (docs/exact.md, "What auto asks for").
"""

from samecurve.core.planning.facts import Facts

_COMPILED = 3
_CALLS_OF_ARRAY = 5  # torch's operations; a loss that calls more pays as a model of more arrays


def least_work(facts: Facts, *, compiled: bool) -> float:
    """The FLOP of a microbatch from which on a run is exact. The machine has no say in it."""
    kernels = sum(len(shape) > 2 for shape in facts.model.arrays.values())
    convolutions = max(kernels, facts.repeats.convolutions)
    calls = (facts.repeats.operations - facts.repeats.convolutions) / _CALLS_OF_ARRAY
    arrays = max(len(facts.model.arrays) - kernels, calls)
    work = 75e6 * arrays + 1e9 * convolutions + 3e3 * facts.trainable
    return work * _COMPILED if compiled else work
