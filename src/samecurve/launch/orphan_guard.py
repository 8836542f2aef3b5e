"""Outlives its launcher by a moment: when the pipe from it ends, every process group that it still
names is killed.

Run by its path with `-I -S`, so that it is there within milliseconds. Lines on standard input:
`+GROUP` and `-GROUP`.
"""

import os
import signal
import sys
from contextlib import suppress


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
