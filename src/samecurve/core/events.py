"""What a run says of itself: the lines of journal.jsonl, and the activities of its heartbeat.

`step` counts finished optimizer steps: the first step's line has step 1, a checkpoint at step 500
holds 500 updates.
"""

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "planned",
    "started",
    "step",
    "evaluated",
    "tested",
    "saved",
    "sampled",
    "hashed",
    "sensors",
    "slow",
    "warned",
    "restarted",
    "recovered",
    "resumed",
    "stopped",
    "failed",
    "finished",
]
Request = Literal["stop", "save", "evaluate", "sample"]
# in the order in which a rank goes through them between two steps
Activity = Literal["start", "evaluate", "sample", "save", "data", "step", "end"]

REQUESTS: tuple[Request, ...] = get_args(Request)
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps makes one for each line


class Beat(NamedTuple):
    """Where a rank was when it last gave a sign."""

    step: int  # finished ones
    activity: Activity
    beats: int  # counts up, so that a second beat within an activity is seen too


@dataclass(frozen=True)
class Event:
    """One line of the journal."""

    kind: Kind
    step: int  # finished optimizer steps
    # plain numbers, texts, lists, and a step's means by name; numbers are for all ranks, losses in
    # full precision
    values: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def line(self) -> str:
        """JSON knows no nan and no infinity: such a number is null."""
        values = {"time": round(self.time, 3), "step": self.step, "kind": self.kind, **self.values}
        try:
            return _ENCODER.encode(values) + "\n"
        except ValueError:
            return _ENCODER.encode(_finite(values)) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Event | None":
        """None for a line that is no event (somebody wrote into the file)."""
        try:
            values = json.loads(line)
            if not isinstance(values["kind"], str):
                return None
            return cls(
                values.pop("kind"),
                int(values.pop("step")),
                time=float(values.pop("time")),
                values=values,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
