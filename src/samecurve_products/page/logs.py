"""The logs of a run, as the page shows them: the last lines, earlier ones, or those with a word.

At most a few megabytes are read for an answer. Secrets are hidden, and control characters shown.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from samecurve.seam import printable, regular_only
from samecurve_products.page.errors import RefusedError
from samecurve_products.report.redact import redact

LINES = 200  # of an answer
_TAIL = 1 << 18  # bytes that are read for the last lines
_SEARCHED = 8 << 20  # bytes that one search reads
_MOST_FILES = 1100
_WIDTH = 2000  # characters of a line
_COLOUR = re.compile(rb"\x1b\[[\d;?]*[A-Za-z]")


class LogAnswer(TypedDict):
    files: list[str]
    lines: list[str]
    start: int  # the byte at which the lines begin, or down to which was searched
    more: bool  # whether the file has bytes before that


def log_files(logs: Path, others: Mapping[str, Path]) -> dict[str, Path]:
    """The log files of a run by name: the launcher's, then those of the ranks by number.

    others: logs that lie elsewhere, which come first
    """
    names = []
    try:
        with os.scandir(logs) as entries:
            for entry in entries:
                if entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                if len(names) > _MOST_FILES:
                    break
    except OSError:
        pass
    names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in _parts(name)])
    return {**others, **{printable(name): logs / name for name in names}}


def _parts(name: str) -> list[str]:
    """rank-10.log -> rank-, 10, .log; text and numbers take turns."""
    return re.split(r"([0-9]+)", name)


def read_log(
    files: Mapping[str, Path], name: str = "", *, search: str = "", before: int | None = None
) -> LogAnswer:
    """Read lines of one of the files, the last ones or those that have a word.

    name: of the file; '': the first one
    before: the byte before which the lines end; None: the file's end

    RefusedError: there is no such file, or it can't be read.
    """
    answer: LogAnswer = {"files": list(files), "lines": [], "start": 0, "more": False}
    if not files:
        return answer
    path = files.get(name or next(iter(files)))
    if path is None:
        raise RefusedError(404, f"this run has no log {name[:100]!r}", "", "file")
    try:
        with open(path, "rb", opener=regular_only) as file:
            size = file.seek(0, os.SEEK_END)
            end = size if before is None else max(0, min(size, before))
            begin = max(0, end - (_SEARCHED if search else _TAIL))
            file.seek(begin)
            content = file.read(end - begin)
    except FileNotFoundError:
        return answer
    except OSError as error:
        raise RefusedError(409, f"{path.name} can't be read: {error.strerror}") from None
    if begin:  # the first line may be cut
        cut = content.find(b"\n") + 1
        begin, content = begin + cut, content[cut:]
    lines = content.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    if search:
        wanted = search.casefold()
        shown = [text for line in lines if wanted in (text := _shown(line)).casefold()][-LINES:]
    else:
        kept = lines[-LINES:]
        begin += sum(len(line) + 1 for line in lines[: len(lines) - len(kept)])
        shown = [_shown(line) for line in kept]
    return {**answer, "lines": shown, "start": begin, "more": begin > 0}


def _shown(line: bytes) -> str:
    """A line as it is shown. Of a line that was written over again and again, the last state."""
    last = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = _COLOUR.sub(b"", last[: _WIDTH * 4]).decode(errors="replace")
    return redact(printable(text))[:_WIDTH]
