"""How many samples a step has, and how they are cut into microbatches for the devices.

Where devices are alike, each has an equal share. Of uneven devices the faster ones get more
microbatches, so that no device waits for another; sums lose nothing, so this changes no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from samecurve.core.config.sections import Batch, Config, Devices
from samecurve.core.config.train_section import Train
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
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count, join_words, show_seconds

_MOST_MICROBATCHES = 10**6  # of a step
# share of a step: the largest microbatches are taken whose predicted step is so close to the best
_CLOSE = 0.03
# share of an even split: the assumed cost of launching a microbatch, where the config gives speeds
_LAUNCH = 0.02
_WORTH = 0.05  # share of a step: measured speeds are no more certain than that


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
        return "as this run began"
    return f"as this run began (the config's {in_config} would need --new-batch)"


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


def with_even_balance(config: Config) -> Config:
    """The config with an even split, for other devices or for a trial."""
    return config.with_values(devices={"balance": "even"})


def check_uneven(devices: Devices, batch: Batch, layout: Layout, *, can_measure: bool) -> None:
    """UserError: this layout or batch can't be split unevenly, or the speeds can't be known.

    can_measure: speeds are measured before the run, or were measured
    """
    num_devices, refusal = layout.num_devices, layout.spec.refuses.get("devices.balance")
    if devices.balance == "even":
        return
    if num_devices == 1:
        raise _refused(
            "one device takes all microbatches there are", "--balance even, or more devices"
        )
    if refusal:
        raise _refused(refusal.why, refusal.remedy)
    if batch.samples and batch.accumulate:
        raise _refused(
            "batch.accumulate cuts a step evenly",
            "leave batch.accumulate out; batch.per_device is the most that a device takes at once",
        )
    if devices.balance == "measured" and not can_measure:
        example = "2,1,..." if num_devices > 2 else "2,1"
        raise UserError(
            "devices.balance measured: ranks that others started (torchrun, Slurm, --nnodes) can't"
            " be measured before they train",
            f"relative speeds by hand, one for each of the {num_devices} devices: --balance"
            f" {example}",
            "devices.balance",
        )
    if not isinstance(devices.balance, str) and len(devices.balance) != num_devices:
        raise UserError(
            f"devices.balance gives {counted(len(devices.balance), 'speed')} for {num_devices}"
            " devices",
            "one for each, in their order",
            "devices.balance",
        )


def _refused(why: str, remedy: str) -> UserError:
    return UserError(f"devices.balance: {why}", remedy, "devices.balance")


def choose_speeds(devices: Devices, train: Train, facts: Facts) -> Speeds | None:
    """The speeds by which microbatches are assigned; None: the devices are alike.

    UserError: smaller microbatches would change the result.
    """
    if devices.balance == "even":
        return None
    if facts.coupled and (train.norm_sync or not train.allow_coupled):
        raise _refused(
            f"{first_and_count(facts.coupled)} mixes the samples of a microbatch, and smaller ones"
            " would change the result",
            "--balance even, or a norm that treats each sample by itself (GroupNorm, LayerNorm)",
        )
    if not isinstance(devices.balance, str):
        return Speeds(devices=tuple(Speed(0.0, 1 / speed) for speed in devices.balance))
    return (
        facts.measured.speeds if facts.measured.speeds and facts.measured.speeds.devices else None
    )


def microbatch_seconds(speeds: Speeds, micro_batch_size: int) -> tuple[float, ...]:
    """Seconds that a microbatch takes on each device."""
    return tuple(
        device.seconds_per_microbatch + micro_batch_size * device.seconds_per_sample
        for device in speeds.devices
    )


def predict_step_seconds(
    speeds: Speeds, global_batch_size: int, micro_batch_size: int, times: Sequence[float] = ()
) -> float:
    """Seconds of a step; where the config gives speeds, in their unit.

    times: seconds of a microbatch on each device, which decide the assignment; empty: even
    """
    count, num_devices = -(-global_batch_size // micro_batch_size), len(speeds.devices)
    seconds = []
    for place, device in enumerate(speeds.devices):
        numbers = microbatches_of(count, place, num_devices, times)
        samples = 0
        if numbers:
            last = min(numbers.stop * micro_batch_size, global_batch_size)
            samples = last - numbers.start * micro_batch_size
        seconds.append(
            len(numbers) * device.seconds_per_microbatch + samples * device.seconds_per_sample
        )
    return max(seconds) + speeds.rest


def largest_close_to_best(speeds: Speeds, global_batch_size: int, most: int) -> int:
    """The largest microbatch, up to `most`, with which a step is close to the best one."""
    counts = range(-(-global_batch_size // most), global_batch_size + 1)
    sizes = sorted({-(-global_batch_size // count) for count in counts}, reverse=True)
    seconds = {}
    for size in sizes:
        times = microbatch_seconds(speeds, size)
        seconds[size] = predict_step_seconds(speeds, global_batch_size, size, times)
    limit = min(seconds.values()) * (1 + _CLOSE)
    return next(size for size in sizes if seconds[size] <= limit)


def choose_uneven_split(speeds: Speeds, even: BatchSplit, *, may_cut: bool) -> Decision[BatchSplit]:
    """A split by the devices' speeds, or the even split where that is as good.

    even: the split for devices that are alike
    may_cut: whether microbatches may be smaller
    """
    global_batch_size, most = even.global_batch_size, even.micro_batch_size
    if not speeds.origin:
        speeds = _with_launch_cost(speeds, most)
    size = largest_close_to_best(speeds, global_batch_size, most) if may_cut else most
    times = microbatch_seconds(speeds, size)
    before = predict_step_seconds(speeds, global_batch_size, most)
    after = predict_step_seconds(speeds, global_batch_size, size, times)
    least_gain = _WORTH if speeds.origin else 0
    if after >= before * (1 - least_gain):
        why = "no other split is quicker"
        if speeds.origin:
            why = f"another split is predicted to save less than {_WORTH:.0%} of a step"
        return Decision(even, {"balance": f"{_say_speeds(speeds, most)}; {why}"})
    uneven = replace(even, micro_batch_size=size, microbatch_seconds=times)
    gain = (
        f"forward and backward are predicted to take {after / before:.2f} of what they take split"
        " evenly"
    )
    if speeds.origin:
        gain = (
            f"a step is predicted to take {show_seconds(after)} instead of {show_seconds(before)}"
        )
    reasons = {"balance": f"{_say_speeds(speeds, size)}; {gain}"}
    if size < most:
        reasons["micro"] = (
            f"small enough to split unevenly: within {_CLOSE:.0%} of the best step that is"
            " predicted"
        )
    return Decision(uneven, reasons, _warn_of_idle(uneven))


def _with_launch_cost(speeds: Speeds, micro_batch_size: int) -> Speeds:
    """Speeds with the cost of launching a microbatch, which speeds in the config leave out."""
    devices = tuple(
        replace(
            device, seconds_per_microbatch=_LAUNCH * micro_batch_size * device.seconds_per_sample
        )
        for device in speeds.devices
    )
    return replace(speeds, devices=devices)


def _warn_of_idle(split: BatchSplit) -> tuple[str, ...]:
    count, times = split.num_microbatches, split.microbatch_seconds
    idle = [
        place for place in range(len(times)) if not microbatches_of(count, place, len(times), times)
    ]
    return tuple(
        f"device {place} gets no microbatch: the others have done all {count} of a step before it"
        " would have done one"
        for place in idle
    )


def _say_speeds(speeds: Speeds, micro_batch_size: int) -> str:
    if not speeds.origin:
        ratio = " to ".join(f"{1 / device.seconds_per_sample:g}" for device in speeds.devices)
        return f"devices.balance {ratio}"
    rates = [
        f"{micro_batch_size / time:.3g}" for time in microbatch_seconds(speeds, micro_batch_size)
    ]
    return f"{join_words(rates)} samples/s {speeds.origin}"
