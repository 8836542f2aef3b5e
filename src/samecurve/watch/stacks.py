"""The place where a Python program is, read from the stacks that faulthandler wrote."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

Kind = Literal["collective", "data", "backward", "other"]

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$", re.MULTILINE)
_ALONE = re.compile(r"^Stack \(most recent call first\):$", re.MULTILINE)  # of a main thread
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "samecurve/torch_engine/process_group.py",
    "samecurve/torch_engine/strategies/reducers/tree.py",
    "multihost_utils.py",
)
_LIBRARY_FILES = (
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

    @property
    def is_users(self) -> bool:
        """Whether the line is in the user's own code."""
        return not self.is_in(*_LIBRARY_FILES)

    def is_in(self, *parts: str) -> bool:
        """Whether its file's path has one of these parts."""
        path = self.file.replace("\\", "/")
        return any(part in path for part in parts)


Stack = Sequence[Frame]  # the frames of one thread, innermost first


@dataclass(frozen=True)
class Location:
    """The place in the code where a program is."""

    kind: Kind
    text: str  # in words, with the user's own line where there is one


def parse_threads(dump: str) -> list[Stack]:
    """The stack of each thread; the main thread last, as faulthandler writes them.

    Where no dump of all threads is there, the stacks that main threads have written of themselves.
    """
    header = _THREAD if _THREAD.search(dump) else _ALONE
    parts = header.split(dump)[1:]
    return [
        [Frame(file, int(line), function) for file, line, function in _FRAME.findall(part)]
        for part in parts
    ]


def locate(dump: str, worker_dumps: str = "") -> Location | None:
    """Where the program's main thread is; None: the dump holds no stack.

    If the main thread waits for data, the place is that of the thread or data worker that reads it.

    worker_dumps: stacks of the program's data workers
    """
    stacks = parse_threads(dump)
    if not stacks or not stacks[-1]:
        return None
    main = stacks[-1]
    if any(frame.is_in("samecurve/data/") for frame in main[:4]):
        return Location("data", f"the feed{_describe_reader(stacks, worker_dumps)}")
    if any(frame.is_in(*_COLLECTIVE_FILES) for frame in main[:6]):
        return Location("collective", _describe_collective(main))
    if any(frame.function in {"backward", "_engine_run_backward"} for frame in main[:4]):
        return Location("backward", f"backward: {_describe_place(main)}")
    return Location("other", _describe_place(main))


def _describe_reader(stacks: Sequence[Stack], worker_dumps: str) -> str:
    """The line of code or the data worker that the feed waits for, in words."""
    reader = stacks[-1]
    for stack in stacks[:-1]:
        if any(frame.is_in("samecurve/data/feed.py") for frame in stack):
            reader = stack
            break
    if not any(frame.is_in("samecurve/data/workers.py") for frame in reader):
        return f": {_describe_place(reader)}"
    for stack in parse_threads(worker_dumps):
        if any(frame.is_users for frame in stack):
            return f": a data worker in {_describe_place(stack)}"
    return ", waiting for a data worker"


def _describe_collective(stack: Stack) -> str:
    inner = next(frame for frame in stack if frame.is_in(*_COLLECTIVE_FILES))
    if inner.is_in("torch/distributed/"):
        return inner.function
    return f"the exchange between ranks ({inner.function})"


def _describe_place(stack: Stack) -> str:
    """The innermost line of the user's code and what it called; else the innermost line."""
    for depth, frame in enumerate(stack):
        if frame.is_users and depth:
            return f"{frame} -> {stack[0].function}()"
        if frame.is_users:
            return str(frame)
    return str(stack[0])
