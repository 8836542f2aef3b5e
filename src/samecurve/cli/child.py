"""The command line as the process of a call from Python: it is told to stop when its parent ends.

The module is not in api/, whose package imports what planning needs: that would delay each start.
"""

import signal
import sys

from samecurve.cli.entry import run
from samecurve.core.system.child_process import die_with

if __name__ == "__main__":
    _, parent, *arguments = sys.argv
    die_with(int(parent), signal.SIGTERM)
    sys.argv = ["samecurve", *arguments]
    run()
