"""The name under which `ps`, `top` and `nvidia-smi` show a process. Linux only."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

_SET_NAME = 15  # PR_SET_NAME
_LONGEST = 15  # bytes of the name that `top` shows


def name_rank(rank: int) -> None:
    """Call this process `samecurve rank N`; its own arguments follow, as far as there is room.

    The name for `top` has no blank: where Slurm follows processes by proctrack/linuxproc, it would
    lose a process with one, and neither stop nor kill it.
    """
    if sys.platform != "linux":
        return
    short = f"samecurve-rank{rank}"
    if len(short) > _LONGEST:
        short = f"samecurve-r{rank}"
    ctypes.CDLL(None).prctl(_SET_NAME, short.encode()[:_LONGEST], 0, 0, 0)
    with suppress(OSError, ValueError, IndexError):  # /proc is another system's, or is not there
        _replace_first_argument(f"samecurve rank {rank}".encode())


def _replace_first_argument(name: bytes) -> None:
    """Write over the memory in which the system finds this process's arguments.

    Python has copied them when it started. The memory's length stays, and its last byte is 0.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49
    before = Path("/proc/self/cmdline").read_bytes()
    room = end - begin
    if len(before) != room or room <= len(name) + 1:
        return
    _, _, others = before.partition(b"\0")
    content = (name + b"\0" + others)[: room - 1]
    ctypes.memmove(begin, content.ljust(room, b"\0"), room)
