"""What exactness is foreseen to cost, by a rule of the model and its batch.

The devices have no say: CPU ranks are taken for threads of one core each, GPUs for one that is on
file. So the same is foreseen on any machine, and train.exact: auto decides alike there.
"""

import math

from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Kind
from samecurve.core.planning.memory import MemoryOptions, sample_bytes

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

# No step was measured on a GPU yet. There, a host begins the operations while the GPU computes, as
# long as it is ahead; and a microbatch moves bytes of weights and gradients once more.
_GPU = "H100"  # one for all, so that no two decide otherwise
_SECONDS_PER_ARRAY = _FLOPS_PER_ARRAY / 8e10  # a core's FLOP/s in the pairs that were measured
_AHEAD = 2  # a GPU is to compute so many times as long as its host calls operations
_BYTES_PER_TRAINED = 24  # read forward and backward, gradient written, read with the sum, added
_BYTES_PER_FROZEN = 8  # read forward and backward
_MOST_BYTES = 40 << 30  # of a microbatch's activations: half of that GPU's memory


def foreseen_cost(
    facts: Facts, samples: int, micro: int, *, kind: Kind = "cpu", compiled: bool = False
) -> float | None:
    """How much longer one device takes for a step in microbatches than at once, as a share of the
    step; None: not known.

    samples: of a step; micro: of a microbatch; kind: of device, whose CPU ranks have one thread;
    compiled: whether the model is (train.compile)
    """
    if not facts.flops_per_sample or not facts.arrays:
        return None
    more, work = -(-samples // micro) - 1, facts.flops_per_sample * samples
    # where a loss looks at the whole batch, features of several microbatches are computed twice
    again = work / 3 if facts.whole_batch and more else 0
    if kind == "cuda":
        return _cost_on_gpu(facts, work, again, more)
    each = _FLOPS_PER_NUMBER * facts.trainable
    each += _FLOPS_PER_KERNEL * max(_kernels(facts), facts.convolutions)
    each += _flops_of_calls(facts)
    if compiled:
        each *= _COMPILED
    return (more * each + again) / (work + each)


def _cost_on_gpu(facts: Facts, work: float, again: float, more: int) -> float:
    """foreseen_cost() on the GPU that is on file.

    work: FLOP of a step; again: FLOP that are computed a second time; more: microbatches, but one
    """
    from samecurve.core.planning.hardware import ASSUMED_MFU, on_file

    sheet = next(device for device in on_file()[1] if device.name == _GPU)
    computing = work / (sheet.peaks["bf16"] * ASSUMED_MFU)  # seconds
    arrays = max(len(facts.arrays), facts.operations / _OPERATIONS_PER_ARRAY)
    calling = _AHEAD * _SECONDS_PER_ARRAY * arrays
    frozen = facts.params - facts.trainable
    moved = _BYTES_PER_TRAINED * facts.trainable + _BYTES_PER_FROZEN * frozen
    moving = moved / sheet.bandwidth
    at_once = max(computing, calling) + moving
    in_microbatches = max(computing * (1 + again / work), (more + 1) * calling)
    return (in_microbatches + (more + 1) * moving) / at_once - 1


def most_samples(options: MemoryOptions, facts: Facts) -> float:
    """The samples of a microbatch whose activations leave a GPU room for all else; at least one."""
    each = sample_bytes(options, facts)
    return max(1, _MOST_BYTES / each) if each else math.inf


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
