"""A split of a step by the devices' speeds: the faster ones get more microbatches, so that no
device waits for another. Sums lose nothing, so this changes no result.
"""

from collections.abc import Sequence
from dataclasses import replace

from samecurve.core.determinism.microbatches import microbatches_of
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Speeds
from samecurve.units import join_words, show_seconds

# share of a step: the largest microbatches are taken whose predicted step is so close to the best
_CLOSE = 0.03
# share of an even split: the assumed cost of launching a microbatch, where the config gives speeds
_LAUNCH = 0.02
_WORTH = 0.05  # share of a step: measured speeds are no more certain than that


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
