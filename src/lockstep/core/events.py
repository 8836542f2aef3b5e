"""What a run says of itself: the lines of journal.jsonl, and the phases of its heartbeat.

`step` counts finished optimizer steps: the first step's line has step 1, a checkpoint at step 500 holds 500 updates.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["planned", "started", "step", "evaluated", "saved", "sampled", "sensors", "slow", "warned", "restarted", "resumed", "stopped", "failed", "finished"]
Request = Literal["stop", "save", "evaluate", "sample"]
Phase = Literal["start", "data", "step", "evaluate", "sample", "save", "end"]

REQUESTS: tuple[Request, ...] = get_args(Request)
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Event:
    """values: plain numbers, texts and lists; numbers are for all ranks, losses in full precision."""

    kind: Kind
    step: int
    values: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def line(self) -> str:
        return json.dumps({"time": round(self.time, 3), "step": self.step, "kind": self.kind, **self.values}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Event":
        values = json.loads(line)
        return cls(values.pop("kind"), values.pop("step"), time=values.pop("time"), values=values)
