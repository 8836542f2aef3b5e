"""Show text that may come from anywhere: configs, data, names, messages of exceptions.

Characters that would move a cursor, colour a line, turn its direction or break an encoding are
shown as escapes (\\x1b); long texts are cut. Lines that are wider than the terminal break between
words. Lines of progress are written over each other.
"""

import io
import os
import re
import select
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

PROGRESS = "SAMECURVE_PROGRESS"  # names the file that takes lines of progress (probe/progress.py)
_LOOK_EVERY = 0.2  # seconds
_LINE_EVERY = 10.0  # seconds, where lines can't be written over
_OVER = "\r\x1b[K"  # the terminal's line is written anew
# control characters but newline and tab, those that hide or turn text, halves of characters
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text, with invisible characters as escapes."""
    return _HIDDEN.sub(lambda hidden: hidden[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """As printable(), with line breaks and tabs as escapes too: what comes next is not faked."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(text: str, most: int, most_lines: int = 24) -> str:
    """The text, cut to so many characters and lines; the cut keeps its end."""
    lines = text[: most + 1].splitlines()
    if len(text) <= most and len(lines) <= most_lines:
        return text
    tail = most // 5
    head = "\n".join(lines[: most_lines - 4])[: most - tail]
    end = " ".join(text[-tail:].splitlines()[-3:])
    return f"{head} ... {end} ({len(text):,} characters in all)"


def wrapped(text: str, width: int) -> str:
    """The text, with lines wider than `width` broken between words.

    What follows a break is indented to where the line's text begins: behind its first word, where
    two spaces follow that word, as in `plan   torch ddp`, or less far where a word would not fit
    behind that. A word that is wider than the terminal (a path) stays whole, so that it can be
    copied.
    """
    return "\n".join(
        line if len(line) <= width else _wrapped_line(line, width) for line in text.split("\n")
    )


def _wrapped_line(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip()) + 2
    label = re.match(r" *\S+ {2,}", line)
    if label and len(label[0]) <= width // 3:
        indent = len(label[0])
    fitting = (len(word) for word in line.split() if len(word) <= width)
    indent = min(indent, width // 3, width - max(fitting, default=0))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def cut_line(text: str, width: int) -> str:
    """The words of a line that fit into so many columns; an ellipsis stands for the others."""
    if len(text) <= width:
        return text
    words = text[: max(width - 1, 0)].rpartition(" ")[0]
    return f"{words.rstrip()} \N{HORIZONTAL ELLIPSIS}".strip()


def width_of(stream: IO[str]) -> int | None:
    """Columns of the stream's terminal; None: it is no terminal, or its size is not known."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:  # a window that is no file, as IDLE's
        return None


def echo(text: object, *, err: bool = False) -> None:
    """Write a line to stdout, or to stderr."""
    stream = sys.stderr if err else sys.stdout
    shown, width = printable(str(text)), width_of(stream)
    stream.write(f"{wrapped(shown, width) if width else shown}\n")
    stream.flush()


class _WholeWrites(io.FileIO):
    """A file whose write() returns once all bytes are written."""

    def write(self, data: "Buffer", /) -> int:
        with memoryview(data).cast("B") as whole:
            done = 0
            while done < len(whole):
                taken = super().write(whole[done:])
                if taken is None:  # it is non-blocking, and full
                    select.select([], [self], [])
                else:
                    done += taken
            return done


def unbuffered(number: int, errors: str, encoding: str | None = None) -> io.TextIOWrapper:
    """An unbuffered text stream to a file descriptor, which stays open when the stream ends.

    Python's own (PYTHONUNBUFFERED, python -u) writes once and drops the rest, where a pipe takes
    only a part: because a signal came in between, or another process has made it non-blocking.
    """
    raw = _WholeWrites(number, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)


@contextmanager
def shown_progress() -> Iterator[str]:
    """Give the path of a file whose lines are shown on stderr while the block runs.

    A terminal shows the last line; elsewhere a line is printed now and then.
    """
    with _file() as (file, path):
        done = threading.Event()
        follower = threading.Thread(target=_follow, args=(file, done), daemon=True)
        follower.start()
        try:
            yield path
        finally:
            done.set()
            follower.join()


@contextmanager
def _file() -> Iterator[tuple[IO[str], str]]:
    """A file and the path by which a child process opens it. On Linux it has no name of its own, so
    that nothing is left of it, however this process ends.
    """
    from tempfile import NamedTemporaryFile, TemporaryFile  # few commands prepare anything

    if sys.platform == "linux":
        with TemporaryFile("r") as file:
            yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with NamedTemporaryFile("r", prefix="samecurve-progress-") as named:
            yield named, named.name


def _follow(file: IO[str], done: threading.Event) -> None:
    on_terminal, last_shown, written = sys.stderr.isatty(), -_LINE_EVERY, False
    while True:
        is_last = done.wait(_LOOK_EVERY)
        lines = [line for line in file.read().split("\n") if line]
        if lines and on_terminal:
            room = (width_of(sys.stderr) or len(lines[-1]) + 1) - 1  # a line that wraps stays
            print(f"{_OVER}{cut_line(lines[-1], room)}", end="", file=sys.stderr, flush=True)
            written = True
        elif lines and time.monotonic() - last_shown >= _LINE_EVERY:
            print(lines[-1], file=sys.stderr, flush=True)
            last_shown = time.monotonic()
        if is_last:
            break
    if written:
        print(file=sys.stderr)
