"""Read tracebacks from the text of a log or a note.

The last traceback counts, one line a frame, without the frames of the launcher.

Python prints them in a few forms: with `[rank1]: ` before each line (torch's own hook), a chain of
several, one inside another's message (a data worker's), and a SyntaxError without a head. Those of
destructors say nothing of why a program ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.units import counted

ATTEMPT_LINE = "=== attempt"  # begins a start of a run in its logs: what stands before is older
_MAX_LINES = 200  # lines that are read at the end of a log
_MAX_BYTES = 1 << 17
_MAX_WIDTH = 150

_RANK_PREFIX = re.compile(r"^\[rank ?\d+\]:? ?(?!\[)")
_HEAD = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_OTHER_OUTPUT = re.compile(
    r"^(?:\[rank\d+\]:)?\[[IWEF]\d{4} |^Exception ignored |^frame #\d+: |^Exception raised from "
)
_OUR_ROOMS = (
    "core|features|processes|data|probe|checkpoint|observe|diagnose|torch_engine|jax_engine"
    "|tasks|watch|run|worker|launch|experiments|cli|api|storage"
)
_LAUNCHER_FILES = re.compile(
    r"^<frozen (?:runpy|importlib)|/runpy\.py$|/importlib/__init__\.py$"
    r"|/samecurve/(?:processes|launch|worker|run|cli)/|/samecurve/(?:__main__|api)\.py$"
    r"|/torch/distributed/(?:elastic/|launcher/|run\.py|launch\.py)|/bin/torchrun$"
    r"|/multiprocessing/(?:spawn|process|popen_\w+|forkserver|context)\.py$"
    r"|/torch/multiprocessing/spawn\.py$"
)
_WRAPPER_FILES = re.compile(
    r"/torch/nn/modules/module\.py$|/torch/distributed/c10d_logger\.py$"
    r"|/torch/utils/_contextlib\.py$|/torch/_utils\.py$"
)
_OUR_FILES = re.compile(
    rf"/samecurve/(?:(?!launch/script/)(?:{_OUR_ROOMS})/|(?:errors|terminal|units)\.py$)"
    r"|/samecurve_products/"
)
_LIBRARY_FILES = re.compile(
    rf"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|{_OUR_FILES.pattern}|/samecurve/launch/"
)
_PATH_TO_LIBRARY = re.compile(
    r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/"
    rf"|^.*/(?=samecurve/(?:{_OUR_ROOMS})/|samecurve_products/)"
)


@dataclass(frozen=True)
class Frame:
    path: str
    line: int
    function: str  # '' where none is named
    source: str  # '' where it is not printed

    @property
    def is_users(self) -> bool:
        """Whether the frame is in the user's own code."""
        return not _LIBRARY_FILES.search(self.path)

    @property
    def is_ours(self) -> bool:
        """Whether the frame is in this program's code, and not in what starts a script."""
        return bool(_OUR_FILES.search(self.path))

    @property
    def is_launchers(self) -> bool:
        """Whether the frame is in the code that started the program."""
        return bool(_LAUNCHER_FILES.search(self.path))

    def __str__(self) -> str:
        text = f"{_PATH_TO_LIBRARY.sub('', self.path)}:{self.line}"
        if self.function:
            text += f" in {self.function}"
        if self.source:
            text += f": {self.source}"
        return text


@dataclass(frozen=True)
class Traceback:
    frames: tuple[Frame, ...]  # outermost first
    error: str  # the exception's own lines, `Type: message`

    def show_frames(self, most: int) -> list[str]:
        """A line for each frame, at most `most` of them: the middle is left out.

        Frames of launchers and wrappers are left out too.
        """
        frames = [
            frame
            for frame in self.frames
            if not frame.is_launchers and not _WRAPPER_FILES.search(frame.path)
        ]
        lines = [clip(str(frame)) for frame in frames]
        left_out = len(lines) - most
        if left_out > 0:
            begin = most // 3
            lines[begin : begin + left_out] = [f"... {counted(left_out, 'frame')} left out"]
        return lines

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code."""
        for frame in reversed(self.frames):
            if frame.is_users and not frame.is_launchers:
                return frame
        return None


def clip(line: str, width: int = _MAX_WIDTH) -> str:
    """The line without colours, cut to the width."""
    line = _COLOUR.sub("", line)
    if len(line) > width:
        return f"{line[: width - 4]} ..."
    return line


def read_tail(path: Path) -> str:
    """The last lines of a log, from its last start on; '' where there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for index in reversed(range(len(lines))):
        if lines[index].startswith(ATTEMPT_LINE):
            lines = lines[index + 1 :]
            break
    return "\n".join(lines[-_MAX_LINES:])


def last_traceback(text: str) -> Traceback | None:
    """The last traceback of a text, of the main thread if there is one; None: there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    of_main_thread: Traceback | None = None
    of_other_thread: Traceback | None = None
    index = 0
    while index < len(lines):
        is_frame = _FRAME.match(lines[index])  # a SyntaxError's, without a head
        if not is_frame and not _HEAD.match(lines[index]):
            index += 1
            continue
        line_before = lines[index - 1] if index else ""
        if not is_frame:
            index += 1
        traceback, index = _parse_traceback(lines, index)
        if traceback is None or line_before.startswith("Exception ignored "):
            continue
        if line_before.startswith("Exception in thread "):
            of_other_thread = traceback
        else:
            of_main_thread = traceback
    return of_main_thread or of_other_thread


def _parse_traceback(lines: Sequence[str], index: int) -> tuple[Traceback | None, int]:
    """Parse the traceback whose first frame is at this line. Also returns the line after it."""
    frames: list[Frame] = []
    while index < len(lines) and lines[index].startswith("  "):
        if match := _FRAME.match(lines[index]):
            next_line = lines[index + 1] if index + 1 < len(lines) else ""
            source = next_line.strip() if next_line.startswith("    ") else ""
            frames.append(Frame(match["path"], int(match["line"]), match["name"] or "", source))
        index += 1
    begin = index
    while index < len(lines) and not _ends_message(lines[index]):
        index += 1
    error = "\n".join(lines[begin:index]).strip()
    if not error:
        return None, index
    return Traceback(tuple(frames), error), index


def _ends_message(line: str) -> bool:
    """Whether an exception's message is over."""
    patterns = (_HEAD, _FRAME, _OTHER_OUTPUT)
    return line.startswith(_CHAINED) or any(pattern.match(line) for pattern in patterns)
