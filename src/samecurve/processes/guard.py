"""The process that kills process groups when this process is gone: it runs orphan_guard.py."""

import os
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

from samecurve.processes import python_alone, start_program


class OrphanGuard:
    """Kills the groups that were added, and not removed, when this process is gone."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("orphan_guard.py")
        self._process = start_program(
            python_alone(str(path)), new_session=True, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL
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
        # somebody has ended the guard; the ranks themselves still die with the launcher
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), line.encode())
