"""Read a long journal in a process of its own: `python -m samecurve.ui.index RUN STATE PARENT`.

The server stays quick meanwhile, and keeps its memory. What was read so far is saved every few
seconds, so that the page shows it, and at the end.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from samecurve.core.system.parent_death import die_with
from samecurve.report.journal_reader import JournalReader

_AT_ONCE = 4 << 20  # bytes
_SAVED_EVERY = 2.0  # seconds


def index(run: Path, state: Path) -> None:
    """Read a run's journal to its end, and save the reader's state."""
    reader = JournalReader.load(run, state)
    saved = time.monotonic()
    while not reader.read(_AT_ONCE):
        if time.monotonic() - saved > _SAVED_EVERY:
            reader.save(state)
            saved = time.monotonic()
    reader.save(state)


def main() -> None:
    _, run, state, parent = sys.argv
    die_with(int(parent))
    with suppress(OSError):
        os.nice(10)
    index(Path(run), Path(state))


if __name__ == "__main__":
    main()
