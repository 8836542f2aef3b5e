"""What exactness is foreseen to cost on CPU ranks, by a rule of the model and its batch.

The machine has no say: every CPU rank is taken for a thread of one core. So the same cost is
foreseen on any machine, and train.exact: auto decides alike there. GPUs have no rule, since no GPU
has measured the cost.
"""

from samecurve.core.planning.facts import Facts

# What a step pays for each microbatch, whatever its samples, as the work that a CPU's core does in
# that time. Fitted to pairs of steps on CPU ranks of one thread, so that a pair that is taken costs
# less than MOST_COST (docs/exact.md, "What auto foresees"; benchmarks/exact_cost.py).
_FLOPS_PER_ARRAY = 5e6  # its operations are called once more, forward and backward
_FLOPS_PER_KERNEL = 65e6  # of an array of three dimensions or more: a convolution is laid out anew
_FLOPS_PER_NUMBER = 200.0  # its gradient is written and added once more
# Operations of torch for each array in the models that were measured. A loss that calls more
# (a loop over time, layers that are used again) pays as a model of more arrays.
_OPERATIONS_PER_ARRAY = 5
# Compiled, a microbatch pays this many times as much, beside the work of its samples (measured in
# the same way)
_COMPILED = 3


def foreseen_cost(
    facts: Facts, samples: int, micro: int, *, compiled: bool = False
) -> float | None:
    """How much longer a CPU rank of one thread takes for a step in microbatches than at once, as a
    share of the step; None: not known.

    samples: of a step; micro: of a microbatch; compiled: whether the model is (train.compile)
    """
    if not facts.flops_per_sample or not facts.arrays:
        return None
    more, work = -(-samples // micro) - 1, facts.flops_per_sample * samples
    # where a loss looks at the whole batch, features of several microbatches are computed twice
    again = work / 3 if facts.whole_batch and more else 0
    each = _FLOPS_PER_NUMBER * facts.trainable
    each += _FLOPS_PER_KERNEL * max(_kernels(facts), facts.convolutions)
    each += _flops_of_calls(facts)
    if compiled:
        each *= _COMPILED
    return (more * each + again) / (work + each)


def slowdown_by_calls(facts: Facts, samples: float, num_microbatches: int, cores: int) -> float:
    """How many times as long as a step at once, on several cores, the calls of its microbatches
    take: Python's threads begin their operations one after another. 0: not known
    """
    if not facts.flops_per_sample:
        return 0
    work, calls = facts.flops_per_sample * samples, _flops_of_calls(facts)
    return num_microbatches * calls / (work / cores + calls)


def _flops_of_calls(facts: Facts) -> float:
    """The price of calling the operations of a microbatch, but for those with kernels."""
    others = (facts.operations - facts.convolutions) / _OPERATIONS_PER_ARRAY
    return _FLOPS_PER_ARRAY * max(len(facts.arrays) - _kernels(facts), others)


def _kernels(facts: Facts) -> int:
    return sum(len(shape) > 2 for shape in facts.arrays.values())
