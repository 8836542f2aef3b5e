"""Tracebacks as text, out of a log or a note: the last one, without the frames of whoever launched
it, one line a frame.

Python prints them in a few forms: with `[rank1]: ` before each line (torch's own hook), a chain of
several, one inside another's message (a data worker's), and a SyntaxError without a head. Those of
destructors say nothing of why a program ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINES = 200  # of a log's end
WIDTH = 150
ATTEMPT_LINE = "=== attempt"  # a line of a log: what stands before it is of an earlier start
_BYTES = 1 << 17
_PREFIX = re.compile(r"^\[rank ?\d+\]:? ?(?!\[)")
_HEAD = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LOGGED = re.compile(
    r"^(?:\[rank\d+\]:)?\[[IWEF]\d{4} |^Exception ignored |^frame #\d+: |^Exception raised from "
)
_LAUNCHERS = re.compile(
    r"^<frozen"
    r" (?:runpy|importlib)|/runpy\.py$|/samecurve/(?:launch|worker|run|cli)/|/samecurve/(?:__main__|api|system)\.py$|/torch/distributed/(?:elastic/|launcher/|run\.py|launch\.py)|/bin/torchrun$"
    r"|/multiprocessing/(?:spawn|process|popen_\w+|forkserver|context)\.py$|/torch/multiprocessing/spawn\.py$|/importlib/__init__\.py$"
)
_WRAPPERS = re.compile(
    r"/torch/nn/modules/module\.py$|/torch/distributed/c10d_logger\.py$|/torch/utils/_contextlib\.py$|/torch/_utils\.py$"
)
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|/samecurve/(?:core|torch_engine|jax_engine|data|tasks|run|worker|launch|checkpoint)/"
)


@dataclass(frozen=True)
class Frame:
    path: str
    line: int
    function: str
    source: str

    @property
    def is_users(self) -> bool:
        """Of the user's own code."""
        return not _LIBRARY.search(self.path)

    def __str__(self) -> str:
        path = re.sub(
            r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/|^.*/(?=samecurve/(?:core|torch_engine|jax_engine|data|tasks|run|worker|launch|checkpoint|observe)/)",
            "",
            self.path,
        )
        return (
            f"{path}:{self.line}"
            + (f" in {self.function}" if self.function else "")
            + (f": {self.source}" if self.source else "")
        )


@dataclass(frozen=True)
class Traceback:
    """frames: outermost first. error: the exception's own lines, `Type: message`."""

    frames: tuple[Frame, ...]
    error: str

    def show_frames(self, most: int) -> list[str]:
        """A line a frame, at most so many, the middle left out; launchers' and wrappers' frames are
        not among them.
        """
        frames = [
            frame
            for frame in self.frames
            if not _LAUNCHERS.search(frame.path) and not _WRAPPERS.search(frame.path)
        ]
        if len(frames) > most:
            first = most // 3
            left = len(frames) - most
            lines = [
                *map(str, frames[:first]),
                f"... {left} frame{'s' if left > 1 else ''} left out",
                *map(str, frames[first + left :]),
            ]
        else:
            lines = [*map(str, frames)]
        return [clip(line) for line in lines]

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code, where the failure lies deeper."""
        return next(
            (
                frame
                for frame in reversed(self.frames)
                if frame.is_users and not _LAUNCHERS.search(frame.path)
            ),
            None,
        )


def clip(line: str, width: int = WIDTH) -> str:
    line = _COLOUR.sub("", line)
    return line if len(line) <= width else f"{line[: width - 4]} ..."


def read_tail(path: Path) -> str:
    """The last lines of a log, of its last start; '' where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    begun = next(
        (index for index in range(len(lines) - 1, -1, -1) if lines[index].startswith(ATTEMPT_LINE)),
        -1,
    )
    return "\n".join(lines[begun + 1 :][-LINES:])


def last_traceback(text: str) -> Traceback | None:
    """The last traceback of a text. None: there is none."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    found, other = None, None
    index = 0
    while index < len(lines):
        headless = _FRAME.match(lines[index])
        if not _HEAD.match(lines[index]) and not headless:
            index += 1
            continue
        before = lines[index - 1] if index else ""
        trace, index = _parsed(lines, index if headless else index + 1)
        if trace is None or before.startswith("Exception ignored "):
            continue
        if before.startswith("Exception in thread "):
            other = trace
        else:
            found = trace
    return found or other


def _parsed(lines: Sequence[str], index: int) -> tuple[Traceback | None, int]:
    """From the first frame on. Returns it, and where it ends."""
    frames: list[Frame] = []
    while index < len(lines) and lines[index].startswith("  "):
        if found := _FRAME.match(lines[index]):
            source = (
                lines[index + 1].strip()
                if index + 1 < len(lines) and lines[index + 1].startswith("    ")
                else ""
            )
            frames.append(Frame(found["path"], int(found["line"]), found["name"] or "", source))
        index += 1
    begin = index
    while index < len(lines) and not _ends(lines[index]):
        index += 1
    error = "\n".join(lines[begin:index]).strip()
    return (Traceback(tuple(frames), error) if error else None), max(index, begin)


def _ends(line: str) -> bool:
    """Whether an exception's message is over."""
    return bool(_HEAD.match(line) or _FRAME.match(line) or _LOGGED.match(line)) or line.startswith(
        _CHAINED
    )
