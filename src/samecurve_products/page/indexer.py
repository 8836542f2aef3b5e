"""Reads long journals in child processes, one at a time, and knows where their states are kept.

The server stays quick meanwhile, and keeps its memory. A child saves what it has
read every few seconds, so that the page shows it. The states lie in the cache: whoever removes them
loses time, and nothing else.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL

from samecurve.seam import Call, cache_home, start_process
from samecurve_products.report.journal_reader import JournalReader

LONG = 8 << 20  # bytes of a journal that the server does not read itself
_KEPT = 60 * 24 * 3600.0  # seconds for which the state of a run that nobody opens is kept
_PAUSE = 0.1  # seconds between two looks at the child
_AT_ONCE = 4 << 20  # bytes that a child reads between two looks at the clock
_SAVED_EVERY = 2.0  # seconds


def state_path(home: Path) -> Path:
    """The file in the cache with the state of a run's reader."""
    return cache_home() / "runs" / f"{sha256(os.fsencode(home)).hexdigest()[:24]}.npz"


class Indexer:
    """The thread that starts the children. It lives as long as the server."""

    def __init__(self) -> None:
        self._wanted: dict[Path, None] = {}  # run directories, the next one first
        self._failed: dict[Path, int] = {}  # the size of the journal when its child failed
        self._current: Path | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)

    def begin(self, homes: Iterable[Path]) -> None:
        """Begin to read journals of these runs that are long."""
        with self._changed:
            self._wanted |= dict.fromkeys(homes)
        self._thread.start()

    def end(self) -> None:
        """End the thread and its child."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def want(self, home: Path) -> bool:
        """Read this run's journal next. False: its child has failed before, so none is started."""
        with self._changed:
            if self._failed.get(home) == journal_size(home):
                return False
            if self._current != home and self._thread.is_alive():
                self._wanted = dict.fromkeys([home, *self._wanted])
                self._changed.notify()
        return self._thread.is_alive()

    def _work(self) -> None:
        _remove_old()
        while True:
            with self._changed:
                while not self._wanted and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                home = next(iter(self._wanted))
                del self._wanted[home]
                self._current = home
            if _unread(home) > LONG and not self._read(home):
                self._failed[home] = journal_size(home)
            self._current = None

    def _read(self, home: Path) -> bool:
        """Whether a child has read the run's journal."""
        state = state_path(home)
        try:
            state.parent.mkdir(parents=True, exist_ok=True)
            call = Call(__name__, (str(home), str(state)), new_session=True)
            child = start_process(call, stdin=DEVNULL)
        except OSError:
            return False
        while child.poll() is None:
            if self._ended:
                child.kill()
                child.wait()
                return True
            time.sleep(_PAUSE)
        return child.returncode == 0


def journal_size(home: Path) -> int:
    """Bytes of a run's journal; 0: there is none."""
    try:
        return os.stat(home / "journal.jsonl", follow_symlinks=False).st_size
    except OSError:
        return 0


def _unread(home: Path) -> int:
    """Bytes of a journal that its saved state does not have."""
    size = journal_size(home)
    if size <= LONG:
        return size
    reader = JournalReader.load(home, state_path(home))
    reader.read(0)  # a state of another journal is dropped
    return size - reader.position


def _remove_old() -> None:
    """Remove states that were not read for long."""
    for path in (cache_home() / "runs").glob("*.npz"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT:
                path.unlink()


def main(run: str, state: str) -> None:
    """Be a child of the server."""
    with suppress(OSError):
        os.nice(10)
    index(Path(run), Path(state))


def index(run: Path, state: Path) -> None:
    """Read a run's journal to its end, and save the reader's state."""
    reader = JournalReader.load(run, state)
    saved = time.monotonic()
    while not reader.read(_AT_ONCE):
        if time.monotonic() - saved > _SAVED_EVERY:
            reader.save(state)
            saved = time.monotonic()
    reader.save(state)
