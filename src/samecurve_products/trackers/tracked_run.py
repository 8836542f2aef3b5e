"""What trackers need to know of a run: its identity, its config, and which events are new to them.

Some trackers can't take a value back. If a resume repeats steps, such a tracker keeps the first
values: each step is sent once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samecurve.observe import VOIDED, append_event
from samecurve.seam import Event, event_of


def identity_of(run: Path) -> str:
    """The name of the run's first attempt: the same in every start, and in no other run."""
    with open(run / "journal.jsonl", "rb") as journal:
        first = event_of(journal.readline())
    if first and "attempt" in first.values:
        return str(first.values["attempt"])
    return run.resolve().name


def dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= dotted(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


class FirstValues:
    """Which events a tracker gets that can't take a value back."""

    def __init__(self, run: Path, title: str, covered: Mapping[str, int]) -> None:
        """
        title: the tracker's name, for warnings
        covered: what `state()` was when the last tracker of this run ended
        """
        self._run, self._title = run, title
        self.sent = covered.get("sent", 0)  # the newest step that the tracker has
        self.repeated = covered.get("again", 0)  # a resume repeats the steps up to this one

    def is_new(self, event: Event) -> bool:
        """Whether the tracker lacks the event. `resumed` is never new: it has no values."""
        if event.kind == "resumed":
            self._resume(event.step)
            return False
        return event.kind not in VOIDED | {"sensors"} or event.step > self.repeated

    def state(self) -> dict[str, int]:
        return {"sent": self.sent, "again": self.repeated}

    def warn(self, step: int, text: str) -> None:
        """Add a warning to the run's journal."""
        text = f"{self._title}{text}"
        append_event(self._run / "journal.jsonl", Event("warned", step, {"text": text}))

    def _resume(self, step: int) -> None:
        if step < self.sent:
            self.repeated = self.sent
            self.warn(
                step,
                f" has steps {step + 1} to {self.sent} from before and keeps those values:"
                " it takes no step back",
            )
