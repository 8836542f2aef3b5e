"""A run as its files tell it: plan, config, and what its journal says in bounded memory."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from samecurve.seam import Event, Plan
from samecurve_products.report.steps import Steps

_WITH_LISTS = 4  # the last events that keep their lists


@dataclass(kw_only=True)
class Start:
    """A start of a run, from its `planned` line to its last line."""

    time: float  # seconds since 1970
    step: int
    how: str  # engine and strategy
    devices: str
    last_time: float
    last_step: int
    training_since: float | None = None
    end: str = ""  # finished, stopped, failed; '': no line says it
    end_values: Mapping[str, object] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        return max(0.0, self.last_time - self.time)

    @property
    def starting_seconds(self) -> float:
        """From the plan to the first step, or to the end of a start that got no further."""
        until = self.last_time if self.training_since is None else self.training_since
        return max(0.0, until - self.time)


@dataclass
class Totals:
    """Sums over all starts, in seconds, beside the columns of steps."""

    starts: int = 0
    wall: float = 0.0  # of the starts that are not listed, since there are too many
    starting: float = 0.0  # of the same ones
    evaluating: float = 0.0
    saving: float = 0.0
    voided: float = 0.0  # of steps that a resume made void
    voided_steps: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it; its arrays are not checked."""

    step: int
    path: str
    bytes: int
    loss: float  # of the evaluation at the checkpoint's step; nan: none
    versions: Mapping[str, str]


class EvenEvents:
    """Events in bounded memory: the first, the last, and evenly chosen ones between.

    When there are more than `most`, every second one goes. Only the last few keep their lists.
    """

    def __init__(self, most: int, *, keeps_lists: bool = False) -> None:
        self._most, self._keeps_lists = most, keeps_lists
        self.every, self.seen = 1, 0  # one event in `every` is kept
        self._kept: list[Event] = []

    def add(self, event: Event) -> None:
        if self._kept and (self.seen - 1) % self.every:
            self._kept.pop()  # it was kept as the last one alone
        self._kept.append(event)
        self.seen += 1
        if not self._keeps_lists and len(self._kept) > _WITH_LISTS:
            self._kept[-_WITH_LISTS - 1] = _without_lists(self._kept[-_WITH_LISTS - 1])
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self.every *= 2

    def void_beyond(self, step: int) -> None:
        kept = [event for event in self._kept if event.step <= step]
        if len(kept) < len(self._kept):
            self._kept, self.seen = kept, max(0, (len(kept) - 1) * self.every + 1)

    def restore(self, events: list[Event], every: int, seen: int) -> None:
        self._kept, self.every, self.seen = events, every, seen

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._kept)

    def __getitem__(self, index: int) -> Event:
        return self._kept[index]


def _without_lists(event: Event) -> Event:
    values = {name: value for name, value in event.values.items() if not isinstance(value, list)}
    return replace(event, values=values)


@dataclass(kw_only=True)
class RunRecord:
    """A run as its files tell it."""

    directory: Path
    live: bool  # a process holds the run's lock
    plan_json: Mapping[str, object] = field(default_factory=dict)  # the content of plan.json
    plan: Plan | None = None  # the plan as an object; None: it was written by another version
    origins: Mapping[str, str] = field(default_factory=dict)  # where a config value came from
    formulas: Mapping[str, str] = field(default_factory=dict)  # how the plan's estimates came about
    began_from: str | None = None  # another run's checkpoint, with the first weights
    config: Mapping[str, object] = field(default_factory=dict)  # dotted keys
    steps: Steps = field(default_factory=Steps)
    evaluated: EvenEvents = field(default_factory=lambda: EvenEvents(2048))
    best: Event | None = None  # the evaluation with the lowest loss
    tested: Event | None = None  # the last one
    sampled: EvenEvents = field(default_factory=lambda: EvenEvents(64, keeps_lists=True))
    sensors: EvenEvents = field(default_factory=lambda: EvenEvents(1024, keeps_lists=True))
    notable: list[Event] = field(default_factory=list)  # resumes, warnings, ends
    starts: list[Start] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of the journal's lines, by kind
    environment: Mapping[str, object] = field(default_factory=dict)  # of the last start
    checkpoints: list[Checkpoint] = field(default_factory=list)  # newest first
    totals: Totals = field(default_factory=Totals)
    identity: str = ""  # of the journal: another file has another one
    faults: list[str] = field(default_factory=list)  # a line for each thing that could not be read


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def devices(plan: Mapping[str, object]) -> Counter[str]:
    """The names of a plan's devices, each with its number of devices."""
    entries = plan.get("devices")
    if not isinstance(entries, list):
        return Counter()
    return Counter(str(as_mapping(entry).get("name")) for entry in entries)


def show_devices(devices: Mapping[str, int]) -> str:
    """'2 x NVIDIA H100'."""
    return ", ".join(f"{count} x {name}" for name, count in devices.items())
