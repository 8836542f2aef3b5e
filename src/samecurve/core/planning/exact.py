"""Where it is decided whether a run is exact: has the same bits on any devices.

train.exact says yes or no; where it says auto, choose_exact() decides by the config, the model and
the kind of device: on CPU ranks by one rule (exact_auto.py), on GPUs no, since no GPU has measured
the cost. So a config is decided alike on any number of devices, under any strategy, and on any
machine. The run's first plan fixes the choice.

An exact run has microbatches of one size on any devices (choose_exact_batch), adds along the step's
tree, computes with kernels that give the same bits each time, and with the same threads on any
ranks (cpu_ranks.py). What would make bits follow the devices is refused (check_...).
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Batch, Config, Optimizer
from samecurve.core.config.train_section import EXACT_DEVICES
from samecurve.core.feature_list import listed_optimizers, spec_of, why_twice
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit, check_count
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import Kind, Machine, choose_devices
from samecurve.errors import NotExactError
from samecurve.units import counted, first_and_count, show_count


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
    from samecurve.core.planning.exact_auto import least_work  # of auto alone

    least = least_work(facts, compiled=config.compiles_blocks)
    micro, work = 0, 0.0
    for num_devices in exact_candidates(config):
        micro = _microbatch(config, num_devices)
        work = facts.flops_per_sample * micro
        is_cut = micro < (config.batch.samples or 1)
        if is_cut and (why := why_twice(facts.features)):
            return None, why
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
    otherwise = facts.repeats.not_exact or unmeasured
    return next((why for why, is_so in hindrances.items() if is_so), otherwise)


def check_exact_layout(layout: Layout, *, is_auto: bool) -> None:
    """NotExactError: on these devices the bits would be others than on one device.

    is_auto: the plan chose the strategy
    """
    if "tree" not in layout.spec.reducers and layout.num_devices > 1:
        how = f"strategy {layout.strategy}"
        if is_auto:
            how += ", taken because the model does not fit on one device,"
        raise NotExactError(
            f"train.exact: {how} can't add along the step's tree (reducers of its row in"
            " core/strategies.py)",
            "--strategy ddp (dp with engine jax), or --no-exact",
            "devices.strategy",
        )
    names = {device.name for device in layout.devices}
    if len(names) > 1:
        raise NotExactError(
            f"train.exact: {' and '.join(sorted(names))} compute with different kernels",
            "--gpus with devices of one kind",
            "devices.use",
        )


def check_exact_model(facts: Facts) -> None:
    """NotExactError: the model keeps statistics that follow the device."""
    norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
    if norms:
        raise NotExactError(
            f"train.exact: the running statistics of {first_and_count(norms)} follow the device",
            "a norm that treats each sample by itself (GroupNorm, LayerNorm), or --no-exact",
            "model",
        )


def check_exact_kernels(facts: Facts, layout: Layout) -> None:
    """NotExactError: the loss calls operations that these devices can't repeat bit by bit."""
    if facts.repeats.nondeterministic and layout.devices[0].kind == "cuda":
        from samecurve.core.nondeterministic import refusal

        raise NotExactError(*refusal(facts.repeats.nondeterministic), "train.exact")


def check_exact_optimizer(section: Optimizer, facts: Facts, layout: Layout) -> None:
    """NotExactError: this optimizer's arithmetic follows the shards of a parameter."""
    cause = why_not_sharded(section, facts) if layout.shards > 1 else ""
    if cause:
        others = [name for name in listed_optimizers() if not spec_of(name).why_not_sharded]
        raise NotExactError(
            f"train.exact under {layout.strategy}: {cause}",
            f"optimizer.name adamw, sgd, {' or '.join(others)}; or --strategy ddp",
            "task" if facts.updates.user_optimizer else "optimizer.name",
        )


def why_not_sharded(section: Optimizer, facts: Facts) -> str:
    """Why train.exact can't update shards with this optimizer; empty: it can."""
    own = facts.updates.user_optimizer
    if own is not None:
        return (
            f"{own.name} of {own.by} would update parts of arrays, and torch's kernels may round"
            " the ends of a part in another way than the same numbers of a whole array"
        )
    spec = spec_of(section.name)
    return spec.why_not_sharded if spec else ""


def choose_exact_batch(
    section: Batch,
    fixed: Fixed | None,
    num_devices: int,
    interleaved: int = 1,
    *,
    most_devices: int,
    is_auto: bool,
) -> Decision[BatchSplit]:
    """The batch of train.exact, whose microbatches have one size on any devices.

    interleaved: devices that share a copy of the model
    most_devices: train.exact_devices
    is_auto: the plan chose train.exact, and batch.per_device was not meant as its microbatch

    NotExactError: the config cuts a step by the number of devices, or into too many parts.
    """
    if section.samples and section.accumulate:
        raise NotExactError(
            "train.exact: batch.accumulate cuts a step by the number of devices",
            "batch.per_device: the samples of a microbatch, on any devices",
            "batch.accumulate",
        )
    if fixed and fixed.global_batch_size:
        global_batch_size, why_batch = fixed.global_batch_size, "as this run began"
    elif section.samples:
        global_batch_size, why_batch = section.samples, "batch.samples, whatever the devices"
    else:
        global_batch_size = (section.per_device or 0) * (section.accumulate or 1) * num_devices
        why_batch = "as given per device: it grows with the devices"
    if fixed:
        micro, why_micro = fixed.micro_batch_size, "as this run began (train.exact)"
    else:
        micro, why_micro = _exact_microbatch(
            section, global_batch_size, most_devices=most_devices, is_auto=is_auto
        )
    split = BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=micro,
        num_devices=num_devices,
        interleaved=interleaved,
    )
    if is_auto and fixed is None and num_devices > split.num_microbatches:
        raise NotExactError(
            f"{num_devices} devices share a step of"
            f" {counted(split.num_microbatches, 'microbatch')}",
            f"train.exact_devices={num_devices}",
            "train.exact_devices",
        )
    check_count(split, NotExactError)
    return Decision(split, {"batch": why_batch, "micro": why_micro, "exact": say_exact(split)})


def say_exact(split: BatchSplit) -> str:
    """How an exact step is computed, for the plan."""
    how = (
        f"{counted(split.num_microbatches, 'microbatch')} of {split.micro_batch_size} a step, each"
        " computed by itself and added along one tree; the order of devices changes no bit"
    )
    if split.interleaved > 1:
        how += f"; in each round {split.interleaved} devices take neighbouring ones"
    return how


def _exact_microbatch(
    section: Batch, global_batch_size: int, *, most_devices: int, is_auto: bool
) -> tuple[int, str]:
    """The samples of a microbatch, and why as many."""
    share = -(-global_batch_size // most_devices)
    why = (
        f"the batch over {most_devices} devices, whatever their number (train.exact_devices);"
        " batch.per_device gives another size"
    )
    if section.per_device and is_auto:
        return min(section.per_device, share), f"{why} at most"
    if section.per_device:
        return min(section.per_device, global_batch_size), "batch.per_device"
    return share, why
