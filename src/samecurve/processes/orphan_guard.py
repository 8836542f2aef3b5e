"""A process that kills process groups when the process that named them is gone.

The groups are named in lines on standard input: `+GROUP` adds one, `-GROUP` removes it.
When the input ends, the guard kills the groups that remain. The file is run by its path with
`-I -S`, so that the guard is there within milliseconds.
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
