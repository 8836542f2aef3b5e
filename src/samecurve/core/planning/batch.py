"""How many samples a step has, and how they are cut into microbatches where devices are alike.

With train.exact the size of a microbatch never follows from the devices.
"""

from dataclasses import dataclass
from functools import cached_property

from samecurve.core.config.sections import Batch
from samecurve.core.determinism.microbatches import (
    Assignment,
    accumulation_steps,
    assign,
    count_microbatches,
    microbatches_of,
)
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.errors import UserError

_MOST_MICROBATCHES = 10**6  # of a step
# train.exact: microbatches of a step, where nothing else is asked for: work for 1, 2, 4, 8 devices
_EXACT_MICROBATCHES = 8


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How the samples of a step are cut into microbatches, and these are assigned to devices."""

    global_batch_size: int
    micro_batch_size: int
    num_devices: int
    # seconds that a microbatch takes on each device; empty: the devices are alike
    microbatch_seconds: tuple[float, ...] = ()

    @cached_property
    def num_microbatches(self) -> int:
        return count_microbatches(self.global_batch_size, self.micro_batch_size)

    @cached_property
    def accumulation_steps(self) -> int:
        """Microbatches of the busiest device in a full step."""
        return accumulation_steps(self.num_microbatches, self.num_devices, self.microbatch_seconds)

    @cached_property
    def microbatches_per_device(self) -> tuple[int, ...]:
        """Microbatches of each device in a full step."""
        count = self.num_microbatches
        return tuple(len(self.microbatches_of(count, place)) for place in range(self.num_devices))

    @property
    def is_split(self) -> bool:
        """Whether a step has several microbatches, on however many devices."""
        return self.global_batch_size > self.micro_batch_size

    def microbatches_of(self, count: int, device: int) -> range:
        """Numbers of the microbatches, of a step's `count`, that one device computes."""
        return microbatches_of(count, device, self.num_devices, self.microbatch_seconds)

    def assignment(self, samples: int, device: int) -> Assignment:
        """The work of one device in a step of so many samples."""
        return assign(
            samples, self.micro_batch_size, device, self.num_devices, self.microbatch_seconds
        )


def choose_batch(
    section: Batch, fixed: Fixed | None, capacity: Capacity, num_devices: int
) -> Decision[BatchSplit]:
    """UserError: the samples that a device is to take at once don't fit, or are too many parts."""
    fixed_size = fixed.global_batch_size if fixed else None
    if section.samples is None and fixed_size is None:
        decision = _split_per_device(section, capacity.samples, num_devices)
    else:
        decision = _split_samples(section, fixed_size, capacity, num_devices)
    _check_count(decision.value)
    return decision


def _split_per_device(
    section: Batch, capacity: int | None, num_devices: int
) -> Decision[BatchSplit]:
    """The global batch that follows from the samples of each device."""
    rounds, micro_batch_size = section.accumulate or 1, section.per_device or 1
    global_batch_size = micro_batch_size * rounds * num_devices
    if capacity is not None and micro_batch_size > capacity:
        more_rounds = -(-micro_batch_size * rounds // capacity)
        smaller = -(-micro_batch_size * rounds // more_rounds)
        raise UserError(
            f"{micro_batch_size} samples at once don't fit: {capacity} do",
            f"--batch-size {smaller} --grad-accum {more_rounds} keeps the batch of"
            f" {global_batch_size}",
            "batch.per_device",
        )
    split = BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_devices=num_devices,
    )
    why_batch = "as given per device: it grows with the devices"
    return Decision(split, {"batch": why_batch, "micro": "batch.per_device"})


def _split_samples(
    section: Batch, fixed_size: int | None, capacity: Capacity, num_devices: int
) -> Decision[BatchSplit]:
    """The fewest rounds in which a given global batch fits."""
    global_batch_size = fixed_size or section.samples or 0
    limits = [limit for limit in (capacity.samples, section.per_device) if limit]
    most = min(limits, default=global_batch_size)
    fewest_rounds = -(-global_batch_size // (num_devices * most))
    rounds = fewest_rounds
    if section.samples and section.accumulate:
        rounds = section.accumulate
    micro_batch_size = -(-global_batch_size // (num_devices * rounds))
    if micro_batch_size > most:
        raise UserError(
            f"{micro_batch_size} samples at once don't fit: {most} do",
            f"leave batch.accumulate out, or make it at least {fewest_rounds}",
            "batch.accumulate",
        )
    if rounds > 1 and most == capacity.samples:
        why_micro = "the largest that memory allows"
        if capacity.was_tried:
            why_micro = "the largest that fitted when tried"
    elif section.per_device:
        why_micro = f"at most batch.per_device, {section.per_device}"
    else:
        why_micro = "a device's whole share"
    split = BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_devices=num_devices,
    )
    why_batch = _why_batch(section, fixed_size, num_devices)
    return Decision(split, {"batch": why_batch, "micro": why_micro})


def _why_batch(section: Batch, fixed_size: int | None, num_devices: int) -> str:
    if fixed_size is None:
        cap = f", at most {section.per_device} at once" if section.per_device else ""
        return f"batch.samples, whatever the devices{cap}"
    in_config = (
        section.samples or (section.per_device or 0) * (section.accumulate or 1) * num_devices
    )
    if in_config == fixed_size:
        return "as this run began"
    return f"as this run began (the config's {in_config} would need --new-batch)"


def choose_exact_batch(
    section: Batch, fixed: Fixed | None, num_devices: int
) -> Decision[BatchSplit]:
    """The batch of train.exact, whose microbatches have one size on any devices.

    UserError: the config cuts a step by the number of devices, or into too many parts.
    """
    if section.samples and section.accumulate:
        raise UserError(
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
    elif section.per_device:
        micro, why_micro = min(section.per_device, global_batch_size), "batch.per_device"
    else:
        micro = -(-global_batch_size // _EXACT_MICROBATCHES)
        why_micro = (
            f"a {_EXACT_MICROBATCHES}th of the batch, whatever the devices (train.exact);"
            " batch.per_device gives another size"
        )
    split = BatchSplit(
        global_batch_size=global_batch_size, micro_batch_size=micro, num_devices=num_devices
    )
    why_exact = (
        f"{split.num_microbatches} microbatches of {micro} a step, computed one by one and added"
        " along one tree; the order of devices changes no bit"
    )
    _check_count(split)
    return Decision(split, {"batch": why_batch, "micro": why_micro, "exact": why_exact})


def _check_count(split: BatchSplit) -> None:
    """UserError: a step has more microbatches than anybody can wait for."""
    if split.num_microbatches > _MOST_MICROBATCHES:
        raise UserError(
            f"a step of {split.global_batch_size} samples in microbatches of"
            f" {split.micro_batch_size} has {split.num_microbatches} of them, more than"
            f" {_MOST_MICROBATCHES}",
            "a smaller batch.samples (or batch.accumulate)",
            "batch",
        )


def batch_warnings(section: Batch, facts: Facts, split: BatchSplit) -> list[str]:
    """Warnings of what the config asked for and the split does not give, and of idle devices."""
    warnings = []
    global_batch_size, micro = split.global_batch_size, split.micro_batch_size
    count, num_devices = split.num_microbatches, split.num_devices
    rounds = -(-count // num_devices)
    if section.samples and section.accumulate and rounds != section.accumulate:
        warnings.append(
            f"batch.accumulate {section.accumulate} can't be: {global_batch_size} samples over"
            f" {num_devices} devices make {rounds} rounds of microbatches of {micro}"
        )
    if global_batch_size > facts.samples:
        warnings.append(
            f"a batch of {global_batch_size} exceeds the {facts.samples} training samples: every"
            f" step is an epoch of {facts.samples}"
        )
    if count < num_devices and not split.microbatch_seconds:
        warnings.append(
            f"{num_devices - count} of {num_devices} devices have nothing to do: a batch of"
            f" {global_batch_size} is {count} microbatches of {micro}"
        )
    return warnings
