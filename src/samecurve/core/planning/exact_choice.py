"""train.exact: auto and measured: whether a run is exact where the config does not say so.

The choice follows from the config, the model and the kind of device, never from the number of
devices or their strategy, so a config is decided alike on any of them. It does follow from the
number of a CPU's cores, which the microbatches of a step have to share out. The run's first plan
fixes the choice.

On CPU ranks auto foresees the cost by a rule. On GPUs, and everywhere with measured, the cost is
what steps took on one device (experiments/exact_cost.py).
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import EXACT_DEVICES
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.lanes import busy_share, why_no_lanes
from samecurve.core.planning.machine import Machine, choose_devices
from samecurve.units import counted, join_words

MOST_COST = 0.05  # share of a step
# What a step pays for each microbatch, whatever its samples, as the work that a device does in that
# time. Fitted to pairs of steps on CPU ranks of one thread, so that a pair that is taken costs less
# than MOST_COST (docs/exact.md, "What auto foresees"; benchmarks/exact_cost.py).
_FLOPS_PER_ARRAY = 5e6  # its operations are called once more, forward and backward
_FLOPS_PER_KERNEL = 65e6  # of an array of three dimensions or more: a convolution is laid out anew
_FLOPS_PER_NUMBER = 200.0  # its gradient is written and added once more
# Operations of torch for each array in the models that were measured. A loss that calls more
# (a loop over time, layers that are used again) pays as a model of more arrays.
_OPERATIONS_PER_ARRAY = 5
# Compiled, a microbatch pays this many times as much, beside the work of its samples (measured in
# the same way)
_COMPILED = 3
_NOT_MEASURED = "its cost is not measured yet (`samecurve train` does that, before a run begins)"


def choose_exact(
    config: Config, machine: Machine, facts: Facts, fixed: Fixed | None
) -> tuple[Config | None, str]:
    """Choose the config of an exact run, and the words for the choice. None: it is not exact.

    fixed: what the run's first plan fixed, whose choice stays; None: this is the first plan
    """
    if fixed is not None:
        exact = config.with_values(train={"exact": True}) if fixed.exact else None
        return exact, "as this run began"
    kind = choose_devices(config.devices, config.engine, machine).value[0].kind
    if hindrance := exact_hindrance(config, facts):
        return None, hindrance
    if is_measured(config, kind):
        return _choose_as_measured(config, facts)
    # OMP_NUM_THREADS has no say: it is often set to the cores of a rank, so it follows their number
    cores = 1 if config.devices.threads else machine.cores
    alone = why_no_lanes(facts, offload_frozen=config.devices.offload_frozen)
    costs, idle = [], ""
    for num_devices in exact_candidates(config):
        samples, micro = config.batch.samples or 1, _microbatch(config, num_devices)
        cost = foreseen_cost(facts, samples, micro, compiled=config.train.compile)
        if cost is None:
            why = f": {facts.flops_unknown}" if facts.flops_unknown else ""
            return None, f"the work of a sample is not known{why}"
        costs.append(f"foreseen to take {1 + cost:.2f} times as long")
        if cost <= MOST_COST:
            count = -(-samples // micro)
            in_turn = _times_of_calls(facts, samples, count, cores)
            times = max((1 + cost) / busy_share(cores, count, has_lanes=not alone), in_turn)
            if times <= 1 + MOST_COST:
                return exact_on(config, num_devices), costs[-1]
            where = f"in {counted(count, 'microbatch')} on {counted(cores, 'core')}"
            where += f": {alone}" if alone else ""
            idle = idle or f"foreseen to take {times:.2f} times as long {where}"
    return None, idle or costs[0]


def flags_for(chosen: Config | None, asked: Config) -> str:
    """The flags that ask for an exact run with the bits of other layouts, which are exact by
    themselves.

    chosen: the config of these; None: they are not exact either. asked: as the user gave it
    """
    number = chosen.train.exact_devices if chosen else asked.train.exact_devices
    if number in {asked.train.exact_devices, EXACT_DEVICES[0]}:
        return "--exact"
    return f"--exact --set train.exact_devices={number}"


def is_measured(config: Config, kind: str) -> bool:
    """Whether what exactness costs on devices of this kind is measured before a run."""
    return config.train.exact == "measured" or (config.train.exact == "auto" and kind == "cuda")


def exact_candidates(config: Config) -> Sequence[int]:
    """The numbers of devices that may share a step, in the order in which they are considered.

    Smaller ones than the first give larger microbatches.
    """
    if config.train.exact_devices:
        return (config.train.exact_devices,)
    numbers = {_microbatch(config, number): number for number in reversed(EXACT_DEVICES)}
    return sorted(numbers.values(), reverse=True)


def exact_on(config: Config, num_devices: int) -> Config:
    """The config of an exact run. num_devices: how many can share a step"""
    return config.with_values(train={"exact": True, "exact_devices": num_devices})


def _choose_as_measured(config: Config, facts: Facts) -> tuple[Config | None, str]:
    cost = facts.exact_cost
    if cost is None:
        return None, _NOT_MEASURED
    if cost.failure:
        return None, cost.failure
    for number, ratio in cost.ratios.items():
        if ratio <= 1 + MOST_COST:
            words = f"a step takes {ratio:.2f} times as long, as was measured"
            return exact_on(config, number), words
    samples = config.batch.samples or 1
    counts = [str(-(-samples // _microbatch(config, number))) for number in cost.ratios]
    ratios = [f"{ratio:.2f}" for ratio in cost.ratios.values()]
    unit = "microbatch" if counts == ["1"] else "microbatches"
    return None, (
        f"in {join_words(counts)} {unit} a step takes {join_words(ratios)} times as long, as"
        " was measured"
    )


def _microbatch(config: Config, num_devices: int) -> int:
    """The samples of a microbatch, of a batch that does not follow the devices.

    num_devices: how many can share a step
    """
    batch = config.batch
    share = -(-(batch.samples or 1) // num_devices)
    return min(share, batch.per_device or share)


def exact_words(split: BatchSplit, why: str) -> str:
    """The words for an exact run that the plan has chosen. why: to be said too; '': nothing"""
    count, places = split.num_microbatches, split.accumulation_steps * split.num_devices
    words = f"the same bits on up to {counted(count, 'device')}"
    if why:
        words += f", {why}"
    if places > count:
        words += f"; {1 - count / places:.0%} of a step the devices idle: {count} microbatches"
        words += f" in {counted(split.accumulation_steps, 'round')}"
    return words


def foreseen_cost(
    facts: Facts, samples: int, micro: int, *, compiled: bool = False
) -> float | None:
    """How much longer one device takes for a step in microbatches than at once, as a share of the
    step; None: not known.

    samples: of a step; micro: of a microbatch; compiled: whether the model is (train.compile)
    """
    if not facts.flops_per_sample or not facts.arrays:
        return None
    each = _FLOPS_PER_NUMBER * facts.trainable
    each += _FLOPS_PER_KERNEL * max(_kernels(facts), facts.convolutions)
    each += _flops_of_calls(facts)
    if compiled:
        each *= _COMPILED
    more, work = -(-samples // micro) - 1, facts.flops_per_sample * samples
    # where a loss looks at the whole batch, features of several microbatches are computed twice
    again = work / 3 if facts.whole_batch and more else 0
    return (more * each + again) / (work + each)


def _times_of_calls(facts: Facts, samples: int, num_microbatches: int, cores: int) -> float:
    """How many times as long as a step at once, on several cores, the calls of its microbatches
    take: Python's threads begin their operations one after another.
    """
    work, calls = (facts.flops_per_sample or 0) * samples, _flops_of_calls(facts)
    return num_microbatches * calls / (work / cores + calls)


def _flops_of_calls(facts: Facts) -> float:
    """The price of calling the operations of a microbatch, but for those with kernels."""
    others = (facts.operations - facts.convolutions) / _OPERATIONS_PER_ARRAY
    return _FLOPS_PER_ARRAY * max(len(facts.arrays) - _kernels(facts), others)


def _kernels(facts: Facts) -> int:
    return sum(len(shape) > 2 for shape in facts.arrays.values())


def exact_hindrance(config: Config, facts: Facts) -> str:
    """What stands in the way of exact runs of this config; '': nothing."""
    batch = config.batch
    hindrances = {
        "engine jax compiles an exact step for every device anew": config.engine == "jax",
        "batch.per_device without batch.samples follows the devices": batch.samples is None,
        "batch.accumulate follows the devices": batch.accumulate is not None,
        "train.allow_coupled": config.train.allow_coupled,
        "the model mixes the samples of a microbatch": bool(facts.coupled),
    }
    return next((why for why, is_so in hindrances.items() if is_so), facts.not_exact)
