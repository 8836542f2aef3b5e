"""Where the time and memory of a step go: what a rank found, and what that says of all of them.

The parts of a step add up to it: `other` is what none of them covers. They are what the step would
be shorter by: what happens while the device computes anyway (data prepared ahead, gradients sent
under backward) is in none of them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

PARTS = {  # by engine, in the order of a step
    "torch": ("data", "forward", "backward", "sync", "optimizer", "other"),
    "jax": ("data", "device", "other"),
}
MEANING = {
    "data": "nothing to compute: the feed has no batch yet",
    "forward": "model and loss; the batch's way to the device",
    "backward": "gradients, with what is computed again",
    "sync": (
        "waiting for other devices or sending to them, computing nothing; not what overlaps with"
        " backward"
    ),
    "optimizer": "norm, clipping, update",
    "device": (
        "the compiled step: forward, backward, collectives and update, which a clock can't tell"
        " apart"
    ),
    "other": "the rest: the loop, metrics, the journal",
}


@dataclass(frozen=True)
class ProfileSchedule:
    """The steps of a profile, in this order.

    The last one is for what is asked of a step, not timed. traced 0: by the clock alone, and
    nothing is asked.
    """

    warm: int = 3
    timed: int = 10
    traced: int = 3

    @property
    def steps(self) -> int:
        return self.last + 1 if self.traced else self.tracer

    @property
    def tracer(self) -> int:
        """The step before those traced, in which the profiler warms up."""
        return self.warm + self.timed

    @property
    def last(self) -> int:
        return self.tracer + (1 + self.traced if self.traced else 0)


@dataclass(frozen=True)
class Step:
    """parts: seconds, without `other`.

    devices: seconds that each device of the process computed, where there are several.
    """

    seconds: float
    samples: int
    parts: Mapping[str, float]
    devices: tuple[float, ...] = ()


@dataclass(frozen=True)
class Operation:
    """A kind of work in a step, without the operations that it calls."""

    name: str
    what: str  # shapes, or what it was compiled from
    calls: float  # of a step
    seconds: float  # of a step
    collective: bool = False  # passes values between devices


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """The measurements of one rank."""

    rank: int
    steps: tuple[Step, ...]
    traced: float  # seconds of a step under the profiler, 0 without
    operations: tuple[Operation, ...]
    memory: Mapping[str, int]  # bytes by plan term, of one device
    peaks: tuple[int, ...]  # bytes by device
    first: float  # seconds of the first step
    kept: Mapping[str, int] = field(default_factory=dict)  # bytes for backward by module
    # seconds that the host takes to queue a step, where the device computes meanwhile
    queueing: float | None = None
    trace: str | None = None  # its file

    def without_short_steps(self) -> "RankProfile":
        """Without the steps of an epoch's short tail, unless there are no others."""
        most = max(step.samples for step in self.steps)
        return replace(self, steps=tuple(step for step in self.steps if step.samples == most))

    @property
    def seconds(self) -> float:
        """Seconds of a step, on average."""
        return statistics.mean(step.seconds for step in self.steps)

    def parts(self, names: Sequence[str]) -> dict[str, float]:
        """Seconds of a step, in the mean, by part; their sum is `seconds`."""
        known = {
            name: statistics.mean(step.parts.get(name, 0.0) for step in self.steps)
            for name in names
            if name != "other"
        }
        return {**known, "other": self.seconds - sum(known.values())}

    def busy_seconds(self, names: Sequence[str]) -> float:
        """Seconds of a step in which this rank did not wait for others."""
        return self.seconds - self.parts(names).get("sync", 0.0)

    def computing(self) -> tuple[float, ...]:
        """Seconds of a step that each device computed, where this process has several."""
        return tuple(
            statistics.mean(one) for one in zip(*(step.devices for step in self.steps), strict=True)
        )


def mean_parts(profiles: Sequence[RankProfile], names: Sequence[str]) -> dict[str, float]:
    """Over ranks."""
    each = [one.parts(names) for one in profiles]
    return {name: statistics.mean(parts[name] for parts in each) for name in names}


def durations(profiles: Sequence[RankProfile]) -> list[float]:
    """The duration of each step: that of its slowest rank."""
    return [
        max(step.seconds for step in steps)
        for steps in zip(*(one.steps for one in profiles), strict=True)
    ]


def rate(profiles: Sequence[RankProfile]) -> float:
    """Samples a second, at the median step: what a busy machine did to a few does not count."""
    return profiles[0].steps[0].samples / statistics.median(durations(profiles))


def operations(profiles: Sequence[RankProfile]) -> list[Operation]:
    """The mean over ranks, the costliest first."""
    means: dict[tuple[str, str, bool], Operation] = {}
    for operation in (operation for one in profiles for operation in one.operations):
        key = operation.name, operation.what, operation.collective
        mean = means.get(key, replace(operation, calls=0.0, seconds=0.0))
        calls = mean.calls + operation.calls / len(profiles)
        seconds = mean.seconds + operation.seconds / len(profiles)
        means[key] = replace(mean, calls=calls, seconds=seconds)
    return sorted(means.values(), key=lambda operation: -operation.seconds)


def slowest(
    profiles: Sequence[RankProfile], names: Sequence[str]
) -> tuple[int, float, float] | None:
    """(rank whose own work takes longest, its seconds of a step, the fastest one's); None: one
    rank.
    """
    if len(profiles) < 2:
        return None
    busy = {one.rank: one.busy_seconds(names) for one in profiles}
    rank = max(busy, key=lambda rank: busy[rank])
    return rank, busy[rank], min(busy.values())
