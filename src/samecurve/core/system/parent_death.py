"""Processes that end with their parents."""

import ctypes
import os
import signal
import sys


def die_with(parent: int, by: int = signal.SIGKILL) -> None:
    """Have the system end this process when its parent ends, even by kill -9.

    by: the signal that ends this process. Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
