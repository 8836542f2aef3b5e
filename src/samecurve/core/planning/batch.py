"""How many samples a step has, and how they are cut into microbatches for the devices.

Each device has an equal share, where no feature splits the step in another way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from samecurve.core.config.sections import Batch
from samecurve.core.determinism.microbatches import (
    Assignment,
    accumulation_steps,
    assign,
    count_microbatches,
    in_turn,
    microbatches_of,
)
from samecurve.core.planning import Decision
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.errors import UserError
from samecurve.units import counted

_MOST_MICROBATCHES = 10**6  # of a step


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How the samples of a step are cut into microbatches, and these are assigned to devices."""

    global_batch_size: int
    micro_batch_size: int
    num_devices: int
    # seconds that a microbatch takes on each device; empty: the devices are alike
    microbatch_seconds: tuple[float, ...] = ()
    interleaved: int = 1  # devices of a group, which take neighbouring microbatches in a round

    @cached_property
    def num_microbatches(self) -> int:
        return count_microbatches(self.global_batch_size, self.micro_batch_size)

    @cached_property
    def accumulation_steps(self) -> int:
        """Microbatches of the busiest device in a full step."""
        return self.rounds_of(self.num_microbatches)

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
        group, place = divmod(device, self.interleaved)
        return in_turn(self.microbatches_of_group(count, group), place, self.interleaved)

    def microbatches_of_group(self, count: int, group: int) -> range:
        """Those of one group of interleaved devices."""
        num_groups = self.num_devices // self.interleaved
        return microbatches_of(count, group, num_groups, self.microbatch_seconds)

    def rounds_of(self, count: int) -> int:
        """The rounds of a step of `count` microbatches."""
        return accumulation_steps(count, self.num_devices, self.microbatch_seconds)

    def numbers_by_round(self, count: int, group: int) -> list[list[int | None]]:
        """For each round of a step of `count` microbatches the number that each interleaved device
        of one group computes; None: this device idles.
        """
        places = range(group * self.interleaved, (group + 1) * self.interleaved)
        of_devices = [self.microbatches_of(count, device) for device in places]
        rounds = self.rounds_of(count)
        padded = [[None] * (rounds - len(numbers)) + [*numbers] for numbers in of_devices]
        return [list(of_round) for of_round in zip(*padded, strict=True)]

    def assignment(self, samples: int, device: int) -> Assignment:
        """The work of one device in a step of so many samples."""
        count = count_microbatches(samples, self.micro_batch_size)
        numbers = self.microbatches_of(count, device)
        return assign(samples, self.micro_batch_size, numbers, self.rounds_of(count))


def choose_batch(
    section: Batch, fixed: Fixed | None, capacity: Capacity, num_devices: int
) -> Decision[BatchSplit]:
    """UserError: the samples that a device is to take at once don't fit, or are too many parts."""
    fixed_size = fixed.global_batch_size if fixed else None
    if section.samples is None and fixed_size is None:
        size, micro = _sizes_per_device(section, capacity.samples, num_devices)
        why_batch, why_micro = "as given per device: it grows with the devices", "batch.per_device"
    else:
        size = fixed_size or section.samples or 0
        micro, why_micro = _largest_microbatch(section, size, capacity, num_devices)
        why_batch = _why_batch(section, fixed_size, num_devices)
    split = BatchSplit(global_batch_size=size, micro_batch_size=micro, num_devices=num_devices)
    check_count(split)
    return Decision(split, {"batch": why_batch, "micro": why_micro})


def _sizes_per_device(section: Batch, capacity: int | None, num_devices: int) -> tuple[int, int]:
    """The global batch that follows from the samples of each device, and these samples."""
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
    return global_batch_size, micro_batch_size


def _largest_microbatch(
    section: Batch, global_batch_size: int, capacity: Capacity, num_devices: int
) -> tuple[int, str]:
    """The microbatch with which a global batch takes the fewest rounds, and its reason."""
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
        tried = "fitted when tried" if capacity.was_tried else "memory allows"
        return micro_batch_size, f"the largest that {tried}"
    if section.per_device:
        return micro_batch_size, f"at most batch.per_device, {section.per_device}"
    return micro_batch_size, "a device's whole share"


def _why_batch(section: Batch, fixed_size: int | None, num_devices: int) -> str:
    if fixed_size is None:
        cap = f", at most {section.per_device} at once" if section.per_device else ""
        return f"batch.samples, whatever the devices{cap}"
    in_config = (
        section.samples or (section.per_device or 0) * (section.accumulate or 1) * num_devices
    )
    if in_config == fixed_size:
        return "kept from the run's start"
    return f"kept from the run's start (the config's {in_config} would need --new-batch)"


def check_count(split: BatchSplit) -> None:
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
    samples = facts.data.samples
    if global_batch_size > samples:
        warnings.append(
            f"a batch of {global_batch_size} exceeds the {samples} training samples: every"
            f" step is an epoch of {samples}"
        )
    warnings += _short_steps(facts.data.buckets.get("train", ()), global_batch_size)
    if count < num_devices and not split.microbatch_seconds:
        warnings.append(
            f"{num_devices - count} of {num_devices} devices have nothing to do: a batch of"
            f" {global_batch_size} is {counted(count, 'microbatch')} of {micro}"
        )
    return warnings


def _short_steps(bucket_sizes: Sequence[int], global_batch_size: int) -> list[str]:
    """A warning of steps that have less than a batch, because a bucket ends."""
    short = sum(size % global_batch_size > 0 for size in bucket_sizes)
    steps = sum(-(-size // global_batch_size) for size in bucket_sizes)
    if 5 * short < steps or short < 2:  # the last step of an epoch may be short anyway
        return []
    return [
        f"{short} of {steps} steps of an epoch are short: a step is of one bucket, and the last of"
        f" each of the {len(bucket_sizes)} buckets has what is left of it. No sample is dropped or"
        " repeated; a smaller batch, or fewer buckets, makes steps more even"
    ]
