"""One start of a run, as every rank gets it."""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Earlier:
    """What a command did before this start."""

    began: float  # when it began to train
    steps: int  # those that still count
    useful: float  # their seconds
    failed: float  # when the last failure was found
    recoveries: tuple[float, ...] = ()  # seconds of each before that


@dataclass(frozen=True)
class Attempt:
    """One go at a run."""

    name: str
    run: str
    resume: str | None = None  # the checkpoint it begins from
    stop_at: int | None = None  # steps after which it saves and leaves
    coordinator: str | None = None  # host:port where jax's processes meet, if there are several
    evaluate: str | None = None  # train nothing, evaluate what is resumed on "held-out" or "train"
    weights: str | None = None  # where nothing is resumed: a checkpoint of no more than the model
    earlier: Earlier | None = None  # before the same command had to start again

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
