"""A start of a run, in the form in which every rank gets it."""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Earlier:
    """The earlier starts of the same command."""

    began: float  # when the command began to train
    steps: int  # the steps that still count
    useful: float  # the seconds of these steps
    failed: float  # when the last failure was seen
    recoveries: tuple[float, ...] = ()  # the seconds of each earlier recovery


@dataclass(frozen=True)
class Attempt:
    """A start of a run."""

    name: str
    run: str
    resume: str | None = None  # the checkpoint that the start goes on from
    stop_at: int | None = None  # the step after which the run saves and leaves
    coordinator: str | None = None  # host:port where jax's processes meet, if there are several
    evaluate: str | None = None  # only evaluate `resume`, on "held-out", "train" or "test"
    weights: str | None = None  # the weights to begin with, where nothing is resumed
    earlier: Earlier | None = None  # set if the same command has started before

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Attempt":
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Attempt":
        earlier = values.get("earlier")
        if earlier:
            recoveries = tuple(earlier["recoveries"])
            values = {**values, "earlier": Earlier(**{**earlier, "recoveries": recoveries})}
        return cls(**values)


def new_attempt_name() -> str:
    return f"{time.time_ns():x}-{os.getpid()}"
