"""Lines that say how far a long preparation has come, passed to the process that shows them."""

import os
import sys
from collections.abc import Mapping

from samecurve.terminal import PROGRESS


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
