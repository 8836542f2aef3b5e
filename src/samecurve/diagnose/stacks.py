"""What a Python program was doing, from the stacks that faulthandler wrote of its threads."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

Activity = Literal["collective", "data", "backward", "other"]
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVES = (
    "torch/distributed/",
    "samecurve/torch_engine/process_group.py",
    "samecurve/torch_engine/strategies/exact_allreduce.py",
    "multihost_utils.py",
)
_LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "<frozen ",
    "<string>",
    "/samecurve/",
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} {self.function}()"


@dataclass(frozen=True)
class Location:
    """what: kind of place.

    text: the place in words, with the user's own line where there is one.
    """

    activity: Activity
    text: str


def parse_threads(dump: str) -> list[list[Frame]]:
    """The frames of each thread, innermost first; the main thread last, as faulthandler writes
    them.
    """
    parts = _THREAD.split(dump)[1:]
    return [
        [Frame(file, int(line), function) for file, line, function in _FRAME.findall(part)]
        for part in parts
    ]


def locate(dump: str, workers: str = "") -> Location | None:
    """Where the program is: in its main thread, or, if that waits for data, in the thread that
    reads it, or in the data worker that does. workers: their stacks. None: the dump holds no stack.
    """
    found = parse_threads(dump)
    if not found or not found[-1]:
        return None
    main = found[-1]
    if any(_in(frame, "samecurve/data/") for frame in main[:4]):
        feed = next(
            (
                frames
                for frames in found[:-1]
                if any(_in(frame, "samecurve/data/feed.py") for frame in frames)
            ),
            main,
        )
        if any(_in(frame, "samecurve/data/workers.py") for frame in feed):
            own = next(
                (_place(frames) for frames in parse_threads(workers) if any(map(_users, frames))),
                None,
            )
            return Location(
                "data",
                (
                    f"the feed: a data worker in {own}"
                    if own
                    else "the feed, waiting for a data worker"
                ),
            )
        return Location("data", f"the feed: {_place(feed)}")
    if any(_in(frame, place) for place in _COLLECTIVES for frame in main[:6]):
        inner = next(frame for frame in main for place in _COLLECTIVES if _in(frame, place))
        return Location(
            "collective",
            (
                inner.function
                if "torch/distributed/" in inner.file.replace("\\", "/")
                else f"the exchange between ranks ({inner.function})"
            ),
        )
    if any(frame.function in {"backward", "_engine_run_backward"} for frame in main[:4]):
        return Location("backward", f"backward: {_place(main)}")
    return Location("other", _place(main))


def _place(frames: list[Frame]) -> str:
    """The innermost line that is the user's own, and what it called; else the innermost of all."""
    for index, frame in enumerate(frames):
        if _users(frame):
            return f"{frame}" + (f" -> {frames[0].function}()" if index else "")
    return str(frames[0])


def _users(frame: Frame) -> bool:
    return not any(part in frame.file.replace("\\", "/") for part in _LIBRARIES)


def _in(frame: Frame, place: str) -> bool:
    return place in frame.file.replace("\\", "/")
