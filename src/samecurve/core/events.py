"""The events of a run: the lines of journal.jsonl; the activities of its heartbeat; requests to it.

`step` counts finished optimizer steps: the first step's line has step 1, a checkpoint at step 500
holds 500 updates.
"""

import signal
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "planned",
    "started",
    "prepared",
    "step",
    "evaluated",
    "tested",
    "saved",
    "uploaded",
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
# the values of an `evaluated` or `tested` line that are no metrics
BESIDE_METRICS = frozenset({"seconds", "best_loss", "best_value", "best_step"})


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for a stop. nohup has SIGHUP ignored, and then it stays ignored."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


class Beat(NamedTuple):
    """Where a rank was when it last gave a sign."""

    step: int  # finished ones
    activity: Activity
    beats: int  # counts up, so that a sign within an activity is one too


@dataclass(frozen=True)
class Event:
    """An event: a line of the journal."""

    kind: Kind
    step: int  # finished optimizer steps
    # plain numbers, texts, lists, and a step's means by name; numbers are for all ranks, losses in
    # full precision
    values: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
