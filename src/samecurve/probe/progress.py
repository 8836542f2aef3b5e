"""Lines that say how far a long preparation has come, passed to the process that shows them."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from samecurve.terminal import cut_line, width_of

PROGRESS = "SAMECURVE_PROGRESS"  # names the file that takes the lines
_LOOK_EVERY = 0.2  # seconds
_LINE_EVERY = 10.0  # seconds, where lines can't be written over
_OVER = "\r\x1b[K"  # the terminal's line is written anew


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


def show_progress(line: str, environment: Mapping[str, str] = os.environ) -> None:
    """Say how far something long has come.

    The line goes into the file that SAMECURVE_PROGRESS names, which the process that started this
    one reads and shows; without the variable it goes to stderr.
    """
    path = environment.get(PROGRESS)
    if path is None:
        print(line, file=sys.stderr, flush=True)
        return
    with open(path, "a") as file:
        file.write(f"{line}\n")
