"""train.exact: auto: whether a run is exact where the config does not say so.

The choice follows from the config and the model alone, and from the kind of device. On CPU ranks
one rule decides (exact_auto.py); on GPUs the choice is no, since no GPU has measured the cost. So a
config is decided alike on any number of devices, under any strategy, and on any machine. The run's
first plan fixes the choice.
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import EXACT_DEVICES
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.exact_auto import least_work
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Kind, Machine, choose_devices
from samecurve.units import counted, show_count


def choose_exact(
    config: Config, machine: Machine, facts: Facts, fixed: Fixed | None
) -> tuple[Config | None, str]:
    """Choose the config of an exact run, and what is to be said of the choice. None: it is not
    exact, and why.

    fixed: what the run's first plan fixed, whose choice stays; None: this is the first plan
    """
    if fixed is not None:
        exact = config.with_values(train={"exact": True}) if fixed.exact else None
        return exact, "as this run began"
    devices = choose_devices(config.devices, config.engine, machine).value
    if hindrance := exact_hindrance(config, facts, devices[0].kind):
        return None, hindrance
    return _choose_by_work(config, facts)


def _choose_by_work(config: Config, facts: Facts) -> tuple[Config | None, str]:
    if not facts.flops_per_sample or not facts.model.arrays:
        why = f": {facts.flops_unknown}" if facts.flops_unknown else ""
        return None, f"the work of a sample is not known{why}"
    least = least_work(facts, compiled=config.train.compile)
    micro, work = 0, 0.0
    for num_devices in exact_candidates(config):
        micro = _microbatch(config, num_devices)
        work = facts.flops_per_sample * micro
        is_cut = micro < (config.batch.samples or 1)
        if is_cut and "whole_batch" in facts.features:
            return None, "batch_loss() would compute the features of each microbatch twice"
        if work >= least or not is_cut:
            return exact_on(config, num_devices), ""
    return None, (
        f"a microbatch of {counted(micro, 'sample')} is {show_count(work)}FLOP, and exactness costs"
        f" little from {show_count(least)}FLOP on"
    )


def flags_for(chosen: Config | None, asked: Config) -> str:
    """The flags that ask for an exact run with the bits of other layouts, which are exact by
    themselves.

    chosen: the config of these; None: they are not exact either. asked: as the user gave it
    """
    number = chosen.train.exact_devices if chosen else asked.train.exact_devices
    if chosen and asked.batch.per_device:  # which --exact takes for the size of a microbatch
        return f"--exact --set batch.per_device={_microbatch(chosen, number or 1)}"
    if number in {asked.train.exact_devices, EXACT_DEVICES[0]}:
        return "--exact"
    return f"--exact --set train.exact_devices={number}"


def exact_candidates(config: Config) -> Sequence[int]:
    """The numbers of devices that may share a step, in the order in which they are considered.

    Smaller ones than the first give larger microbatches.
    """
    if config.train.exact_devices:
        return (config.train.exact_devices,)
    by_size = {_microbatch(config, number): number for number in reversed(EXACT_DEVICES)}
    return sorted(by_size.values(), reverse=True)


def exact_on(config: Config, num_devices: int) -> Config:
    """The config of an exact run. num_devices: how many can share a step"""
    return config.with_values(train={"exact": True, "exact_devices": num_devices})


def _microbatch(config: Config, num_devices: int) -> int:
    """The samples of a microbatch, of a batch that does not follow the devices.

    num_devices: how many can share a step
    """
    batch = config.batch
    share = -(-(batch.samples or 1) // num_devices)
    return min(share, batch.per_device or share)


def exact_words(split: BatchSplit, why: str, idle_cores: str) -> str:
    """The words for an exact run that the plan has chosen.

    why: to be said too; '': nothing. idle_cores: what would use them; '': there are none
    """
    count, places = split.num_microbatches, split.accumulation_steps * split.num_devices
    words = f"the same bits on up to {counted(count, 'device')}"
    if why:
        words += f", {why}"
    if places > count:
        words += f"; {1 - count / places:.0%} of a step the devices idle: {count} microbatches"
        words += f" in {counted(split.accumulation_steps, 'round')}"
    return f"{words}; {idle_cores}" if idle_cores else words


def exact_hindrance(config: Config, facts: Facts, kind: Kind) -> str:
    """What stands in the way of exact runs of this config on devices of this kind; '': nothing."""
    batch = config.batch
    hindrances = {
        "engine jax compiles an exact step for every device anew": config.engine == "jax",
        "batch.per_device without batch.samples follows the devices": batch.samples is None,
        "batch.accumulate follows the devices": batch.accumulate is not None,
        "train.allow_coupled": config.train.allow_coupled,
        "the model mixes the samples of a microbatch": bool(facts.coupled),
    }
    unmeasured = "unmeasured on GPUs" if kind == "cuda" else ""
    return next(
        (why for why, is_so in hindrances.items() if is_so), facts.repeats.not_exact or unmeasured
    )
