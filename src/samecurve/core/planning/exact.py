"""Where it is decided whether a run is exact: has the same bits on any devices.

train.exact says yes or no; where it says auto, the plan decides by the config, the model and the
kind of device: on CPU ranks by one rule (exact_auto.py), on GPUs no, since no GPU has measured the
cost. So a config is decided alike on any number of devices, under any strategy, and on any machine.
The run's first plan fixes the choice.

What a plan then does in another way is on one page, too: same_bits.py.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import EXACT_DEVICES
from samecurve.core.feature_list import why_twice
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Kind, Machine, choose_devices
from samecurve.core.planning.same_bits import SameBits
from samecurve.errors import UserError
from samecurve.units import counted, show_count

T = TypeVar("T")


def plan_bits(
    config: Config,
    machine: Machine,
    facts: Facts,
    fixed: Fixed | None,
    make: Callable[[SameBits | None, Decision[None]], T],
) -> T:
    """Make the plan of a run whose config does not rule out that it has the same bits.

    fixed: what the run's first plan fixed, whose choice stays; None: this is the first plan
    make: makes the plan; its second argument is what to say where auto has chosen otherwise

    UserError: the plan is refused.
    """
    if not config.train.plan_chooses_bits:
        return make(as_asked(config, machine, fixed), Decision(None))
    devices, why = _choose(config, machine, facts, fixed)
    if devices:
        try:
            chosen = SameBits(config, machine, fixed, devices, is_auto=True, why=why)
            return make(chosen, Decision(None))
        except UserError as refusal:  # which nobody asked for
            why = refusal.reason
    if fixed is not None and fixed.same_bits:
        warning = f"this run was exact until here, and is not from here on: {why}"
        return make(None, Decision(None, {"exact_auto": why}, (warning,)))
    asked, flags = _asked_for(devices, config)
    if _is_planned(lambda: make(as_asked(asked, machine, fixed), Decision(None))):
        why += f"; {flags} asks for it"
    return make(None, Decision(None, {"exact_auto": why}))


def _is_planned(make: Callable[[], object]) -> bool:
    """Whether a plan is made, or refused."""
    try:
        make()
    except UserError:
        return False
    return True


def as_asked(config: Config, machine: Machine, fixed: Fixed | None) -> SameBits:
    """What a plan does whose config asks for the same bits. fixed: as plan_bits() has it"""
    return SameBits(config, machine, fixed, _most_devices(config))


def _most_devices(config: Config) -> int:
    return config.train.exact_devices or EXACT_DEVICES[0]


def _choose(config: Config, machine: Machine, facts: Facts, fixed: Fixed | None) -> tuple[int, str]:
    """How many devices can share a step of an exact run, and what is to be said of the choice.

    0 devices: it is not exact, and why.
    """
    if fixed is not None:
        return _most_devices(config) if fixed.same_bits else 0, "kept from the run's start"
    devices = choose_devices(config.devices, config.engine, machine).value
    if hindrance := _hindrance(config, facts, devices[0].kind):
        return 0, hindrance
    return _choose_by_work(config, facts)


def _choose_by_work(config: Config, facts: Facts) -> tuple[int, str]:
    if not facts.flops_per_sample or not facts.model.arrays:
        why = f": {facts.flops_unknown}" if facts.flops_unknown else ""
        return 0, f"the work of a sample is not known{why}"
    from samecurve.core.planning.exact_auto import least_work  # of auto alone

    least = least_work(facts, compiled=config.compiles_blocks)
    micro, work = 0, 0.0
    for num_devices in _candidates(config):
        micro = _microbatch(config, num_devices)
        work = facts.flops_per_sample * micro
        is_cut = micro < (config.batch.samples or 1)
        if is_cut and (why := why_twice(facts.features)):
            return 0, why
        if work >= least or not is_cut:
            return num_devices, ""
    return 0, (
        f"a microbatch of {counted(micro, 'sample')} is {show_count(work)}FLOP, and exactness costs"
        f" little from {show_count(least)}FLOP on"
    )


def _asked_for(chosen: int, config: Config) -> tuple[Config, str]:
    """The config, and the flags, that ask for an exact run with the bits of other layouts, which
    are exact by themselves.

    chosen: the devices that can share a step of these; 0: they are not exact either
    """
    asked = config.train.exact_devices
    number = chosen or asked
    if chosen and config.batch.per_device:  # which --exact takes for the size of a microbatch
        size = _microbatch(config, chosen)
        flags = f"--exact --set batch.per_device={size}"
        return config.with_values(batch={"per_device": size}), flags
    if number in {asked, EXACT_DEVICES[0]}:
        return config, "--exact"
    flags = f"--exact --set train.exact_devices={number}"
    return config.with_values(train={"exact_devices": number}), flags


def _candidates(config: Config) -> Sequence[int]:
    """The numbers of devices that may share a step, in the order in which they are considered.

    Smaller ones than the first give larger microbatches.
    """
    if config.train.exact_devices:
        return (config.train.exact_devices,)
    by_size = {_microbatch(config, number): number for number in reversed(EXACT_DEVICES)}
    return sorted(by_size.values(), reverse=True)


def _microbatch(config: Config, num_devices: int) -> int:
    """The samples of a microbatch, of a batch that does not follow the devices.

    num_devices: how many can share a step
    """
    batch = config.batch
    share = -(-(batch.samples or 1) // num_devices)
    return min(share, batch.per_device or share)


def _hindrance(config: Config, facts: Facts, kind: Kind) -> str:
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
    otherwise = facts.repeats.not_same_bits or unmeasured
    return next((why for why, is_so in hindrances.items() if is_so), otherwise)
