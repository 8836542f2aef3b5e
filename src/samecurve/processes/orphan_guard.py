"""A process that kills process groups when the process that named them is gone.

The groups are named in lines on its standard input: `+GROUP` adds one, `-GROUP` removes it. When
the input ends, it kills the groups that remain. This file is run by its path with `-I -S`, so that
the process is there within milliseconds.
"""

import os
import signal
import sys
from contextlib import suppress


class OrphanGuard:
    """Kills the groups that were added, and not removed, when this process is gone."""

    def __init__(self) -> None:
        # late: the process itself starts without them
        from subprocess import DEVNULL, PIPE

        from samecurve.processes import python_alone, start_program

        self._process = start_program(
            python_alone(__file__), new_session=True, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
        )

    def __enter__(self) -> "OrphanGuard":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # somebody has ended that process; the ranks themselves still die with the launcher
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
