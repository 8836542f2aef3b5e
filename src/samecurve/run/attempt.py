"""One start of a run, as it is handed to every rank."""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Earlier:
    """What a command did before this start.

    began: when it began to train; steps, useful: those that still count, and their seconds; failed:
    when the last failure was found; recoveries: seconds of each before that.
    """

    began: float
    steps: int
    useful: float
    failed: float
    recoveries: tuple[float, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """One go at a run.

    resume: the checkpoint it begins from; weights: if there is none, a checkpoint of no more than
    the model. stop_at: steps after which it saves and leaves. coordinator: host:port where jax's
    processes meet, if there are several. evaluate: train nothing, only evaluate what is resumed, on
    "held-out" or "train" data. earlier: what the same command did before it had to start again.
    """

    name: str
    run: str
    resume: str | None = None
    stop_at: int | None = None
    coordinator: str | None = None
    evaluate: str | None = None
    weights: str | None = None
    earlier: Earlier | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Attempt":
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Attempt":
        earlier = values.get("earlier")
        return cls(
            **{
                **values,
                "earlier": (
                    Earlier(**{**earlier, "recoveries": tuple(earlier["recoveries"])})
                    if earlier
                    else None
                ),
            }
        )


def new_attempt_name() -> str:
    return f"{time.time_ns():x}-{os.getpid()}"
