"""The result of a rehearsal: what was run, what was found, and what a step costs."""

from dataclasses import asdict, dataclass
from typing import Any

STEADY = 3  # the first step of which host syncs and traffic are counted

# what would make the run fail, or train wrong, on real GPUs
FAILING = {
    "race": "races",
    "use_after_free": "use after free",
    "pinned_source": "pinned memory",
    "late_copy": "copies to the host",
    "host_read": "host reads",
    "device": "wrong device",
    "collective": "collectives",
    "hang": "ranks that wait",
    "out of memory": "out of memory",
    "failed": "runs",
    "losses": "losses",
}
# what a run on real GPUs survives: it is slower there, or gives other bits each time
WARNING = {"host sync": "host syncs", "not_deterministic": "no deterministic kernel"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found, at one line.

    place: the user's line, `file:line in function`; without one, the innermost line known
    inside: the line of a library that the user's line has called; '' where there is none
    there: the other line of a race; '' where there is none
    step: the first step in which it was found, from 1; 0: before a run has begun
    times: of a host sync: how often it is in a steady step of one process
    processes: how many have found it
    """

    kind: str
    text: str
    remedy: str = ""
    place: str = ""
    inside: str = ""
    there: str = ""
    step: int = 0
    times: float = 1
    processes: int = 1

    @property
    def fails(self) -> bool:
        """Whether a run on real GPUs would fail, or train wrong. Kinds that are new here do."""
        return self.kind not in WARNING


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What one steady step of one process does, as a mean of processes and steps."""

    operations: float  # that the host launches on its GPU
    collectives: float
    collective_bytes: float  # that the process gives to them
    copies_to_device: float
    copies_to_host: float
    own_syncs: float  # host syncs of samecurve itself: metrics, read one step late


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of the emulated run beside those on one CPU device."""

    emulated: tuple[float | None, ...]  # of each step; None: not finite
    on_cpu: tuple[float | None, ...]
    difference: float  # the largest relative difference; infinite where one is not finite
    tolerance: float  # relative


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device. estimate: the plan's; None: it has none"""

    peak: int
    limit: int
    estimate: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal did and found."""

    command: str  # what was rehearsed, as it was typed
    gpus: int
    gpu: str
    plan: str  # strategy, backend, precision and batch; '' of a script
    steps: int  # that were run to their end
    steps_asked: int  # 0 of a script
    exit_code: int  # of what was rehearsed
    findings: tuple[Finding, ...]
    costs: StepCosts | None  # None: no step was seen
    memory: Memory | None
    losses: Losses | None  # None: nothing was compared
    notes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether something was found that would fail on real GPUs."""
        return any(finding.fails for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"fails": self.fails, **asdict(self)}
