"""How many samples a step has, and how many of them a device takes at once, where devices are
alike.
"""

from dataclasses import dataclass

from samecurve.core.config.sections import Batch, Config
from samecurve.core.determinism.microbatches import accumulation_steps, count_microbatches
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts, Fixed
from samecurve.errors import UserError

_MOST_MICROBATCHES = 10**6  # of a step


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How a step's samples are cut and assigned."""

    global_batch_size: int
    micro_batch_size: int
    num_devices: int
    microbatch_seconds: tuple[float, ...] = ()  # of each device; empty: they are alike

    @property
    def num_microbatches(self) -> int:
        return count_microbatches(self.global_batch_size, self.micro_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """Microbatches of the device that has most of them."""
        return accumulation_steps(self.num_microbatches, self.num_devices, self.microbatch_seconds)


def choose_batch(
    config: Config, fixed: Fixed | None, capacity: Capacity, num_devices: int
) -> Decision[BatchSplit]:
    """UserError: what is to be taken at once does not fit."""
    section = config.batch
    fixed_batch = fixed.global_batch_size if fixed else None
    if section.samples is None and fixed_batch is None and section.per_device is not None:
        return _split_per_device(section, section.per_device, capacity.samples, num_devices)
    batch = fixed_batch or section.samples or 0
    limits = [limit for limit in (capacity.samples, section.per_device) if limit]
    most = min(limits, default=batch)
    fewest_rounds = -(-batch // (num_devices * most))
    rounds = fewest_rounds
    if section.samples and section.accumulate:
        rounds = section.accumulate
    micro_batch_size = -(-batch // (num_devices * rounds))
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
    return Decision(
        BatchSplit(
            global_batch_size=batch, micro_batch_size=micro_batch_size, num_devices=num_devices
        ),
        {"batch": _why_batch(section, fixed_batch, num_devices), "micro": why_micro},
    )


def _split_per_device(
    section: Batch, micro_batch_size: int, capacity: int | None, num_devices: int
) -> Decision[BatchSplit]:
    """The batch that follows from what each device takes."""
    rounds = section.accumulate or 1
    batch = micro_batch_size * rounds * num_devices
    if capacity is not None and micro_batch_size > capacity:
        more_rounds = -(-micro_batch_size * rounds // capacity)
        smaller = -(-micro_batch_size * rounds // more_rounds)
        raise UserError(
            f"{micro_batch_size} samples at once don't fit: {capacity} do",
            f"--batch-size {smaller} --grad-accum {more_rounds} keeps the batch of {batch}",
            "batch.per_device",
        )
    return Decision(
        BatchSplit(
            global_batch_size=batch, micro_batch_size=micro_batch_size, num_devices=num_devices
        ),
        {
            "batch": "as given per device: it grows with the devices",
            "micro": "batch.per_device",
        },
    )


def _why_batch(section: Batch, fixed_batch: int | None, num_devices: int) -> str:
    if fixed_batch is None:
        cap = f", at most {section.per_device} at once" if section.per_device else ""
        return f"batch.samples, whatever the devices{cap}"
    in_config = (
        section.samples or (section.per_device or 0) * (section.accumulate or 1) * num_devices
    )
    if in_config == fixed_batch:
        return "as this run began"
    return f"as this run began (the config's {in_config} would need --new-batch)"


def check_count(split: BatchSplit) -> None:
    """UserError: nobody waits for as many microbatches, and no list of them is made."""
    if split.num_microbatches > _MOST_MICROBATCHES:
        raise UserError(
            f"a step of {split.global_batch_size} samples in microbatches of"
            f" {split.micro_batch_size} has {split.num_microbatches} of them, more than"
            f" {_MOST_MICROBATCHES}",
            "a smaller batch.samples (or batch.accumulate)",
            "batch",
        )


def batch_warnings(config: Config, facts: Facts, split: BatchSplit) -> list[str]:
    """What the split leaves to be desired."""
    warnings = []
    batch, micro = split.global_batch_size, split.micro_batch_size
    count, num_devices = split.num_microbatches, split.num_devices
    section = config.batch
    rounds = -(-count // num_devices)
    if section.samples and section.accumulate and rounds != section.accumulate:
        warnings.append(
            f"batch.accumulate {section.accumulate} can't be: {batch} samples over {num_devices}"
            f" devices make {rounds} rounds of microbatches of {micro}"
        )
    if batch > facts.samples:
        warnings.append(
            f"a batch of {batch} exceeds the {facts.samples} training samples: every step is an"
            f" epoch of {facts.samples}"
        )
    if count < num_devices and not split.microbatch_seconds:
        warnings.append(
            f"{num_devices - count} of {num_devices} devices have nothing to do: a batch of {batch}"
            f" is {count} microbatches of {micro}"
        )
    if config.train.eval_every and not facts.eval_samples:
        warnings.append(
            "there is nothing to evaluate on: no data is held back (data.validation; eval_data() of"
            " a user task)"
        )
    return warnings
