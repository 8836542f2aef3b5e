"""Repeat the line that matters below torchrun's own traceback.

After Ctrl-C torchrun waits for its ranks, and raises SignalException only then, so no rank can
print after it. A small process waits for torchrun's end, prints the line, and ends. The kernel
frees a process's memory, and with it the command line in /proc, before the shell hears of its end:
the line comes before the shell's prompt.
"""

import os
import sys
from subprocess import DEVNULL

from samecurve.processes import Process, python_alone, start_program

_LONGEST = 60  # seconds: torchrun kills its ranks after 30
_WAIT_AND_PRINT = f"""
import os, sys, time
until = time.monotonic() + {_LONGEST}
try:
    while open(f"/proc/{{sys.argv[1]}}/cmdline").read() and time.monotonic() < until:
        time.sleep(0.001)
except OSError:
    pass
os.write(2, sys.argv[2].encode())
"""


def repeat_after_torchrun(line: str) -> Process | None:
    """Print the line on the terminal when torchrun, which started this process, has ended.

    Does nothing where another launcher started this process, or stderr is no terminal. Returns the
    process that waits.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.stderr.isatty():
        return None
    return start_program(
        python_alone("-c", _WAIT_AND_PRINT, str(os.getppid()), f"{line}\n"),
        new_session=True,  # torchrun ends the groups of its ranks
        stdin=DEVNULL,
        stdout=DEVNULL,
    )
