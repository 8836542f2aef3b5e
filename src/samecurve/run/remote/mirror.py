"""Mirror a run directory to a store while the run trains: a thread beside the training.

It reads files, as all observers do: training calls nothing of it, and never waits for the store.
The newest checkpoint goes first, then the best one, then the others that are kept. Where the store
is slower than the saves, the directory lets some go before their turn, which the journal says. A
store that fails is tried again, until the limit of track.store_patience: then the run saves, stops
and fails.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.system import explain_os_error
from samecurve.errors import RunError, SamecurveError
from samecurve.observe import append_event
from samecurve.observe.failed_event import record_beside
from samecurve.run.directory import Run
from samecurve.run.remote.claimed import Claim
from samecurve.run.remote.journal_parts import JournalParts, NewEvents
from samecurve.run.remote.stored_run import StoredRun
from samecurve.run.remote.uploads import Checkpoints, Files
from samecurve.storage.failures import StorageError
from samecurve.units import show_seconds

_LOOK = 0.25  # seconds between looks at the journal
_EVERY = 15.0  # seconds between two sendings of what has no haste
_PAUSES = (1.0, 20.0)  # seconds before the store is tried again, at first and at most
_WARN_AGAIN = 300.0  # seconds between two warnings about the same failure
_QUIET = 3.0  # seconds of waiting after which the user is told what is waited for
_TRAINED = {"step", "finished", "stopped"}  # before these a run may still be refused
_AT_ONCE = {"saved", "sampled", "resumed", "finished", "stopped", "failed"}


class Mirror:
    """The mirror of a run. failure: why something is owed at the end; None: nothing is."""

    def __init__(
        self, claim: Claim, run: Run, plan: Plan, start: int, stop: Callable[[], None]
    ) -> None:
        """start: the byte of the journal at which this start of the run begins

        stop: asks the run to save and leave
        """
        self.failure: SamecurveError | None = None
        self._claim, self._run, self._stop = claim, run, stop
        self._scratch = TemporaryDirectory(prefix="samecurve-")
        self._journal = JournalParts(claim.place, run.journal)
        self._checkpoints = Checkpoints(claim.place, run, plan, Path(self._scratch.name))
        self._files = Files(claim.place, run)
        self._events = NewEvents(run.journal, start)
        # before its first step a new run may be refused, and then nothing is left of it
        self._has_begun = start > 0 or not claim.is_new
        self._is_compared = False
        self._is_due = True
        self._last = 0.0  # when all was sent
        self._resumed: int | None = None  # a step beyond which nothing counts any more
        self._saved: list[int] = []  # steps that were saved since the last upload
        self._failing: float | None = None  # since when the store fails
        self._warned = 0.0
        self._cause = ""
        self._pause = _PAUSES[0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._mirror, name="mirror", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is sent, or the limit is reached, or Ctrl-C."""
        self._ended.set()
        try:
            self._thread.join(_QUIET)
            if self._thread.is_alive():
                with suppress(OSError):
                    url = self._claim.place.url
                    os.write(2, f"waiting until {url} has everything; Ctrl-C leaves it\n".encode())
                self._thread.join()
        except KeyboardInterrupt:
            self.failure = self._owing("it was left before everything was sent")
        if self._failing is None:
            self._claim.lease.release(forget=not self._has_begun)
        with suppress(OSError):
            self._scratch.cleanup()

    def _mirror(self) -> None:
        while self.failure is None:
            is_last = self._ended.is_set()
            try:
                self._note_events()
                if self._has_begun and (is_last or self._is_due or self._is_time()):
                    self._send(is_last=is_last)
                    self._note_answer()
                if is_last:
                    return
            except (StorageError, OSError) as error:
                self._note_failure(error)
            except BaseException as error:
                what = f"{type(error).__name__}: {error}"
                self._give_up(self._owing(f"the mirror itself failed: {what}"))
            if self._claim.lease.lost:
                self._give_up(self._owing("another run has taken this place"))
            self._rest()

    def _note_events(self) -> None:
        for event in self._events.read():
            self._has_begun |= event.kind in _TRAINED
            self._is_due |= event.kind in _AT_ONCE
            if event.kind == "saved":
                self._saved.append(event.step)
            if event.kind == "resumed":
                self._resumed = event.step

    def _is_time(self) -> bool:
        return time.monotonic() - self._last > _EVERY

    def _send(self, *, is_last: bool) -> None:
        """Send all that the store lacks. StorageError: it is tried again, from where it was."""
        if not self._is_compared:
            stored = StoredRun(self._claim.place)
            for part in (self._journal, self._checkpoints, self._files):
                part.compare(stored)
            self._is_compared = True
        if self._resumed is not None:
            self._checkpoints.void_after(self._resumed)
            self._resumed = None
        self._files.send(logs=is_last)
        self._journal.send()
        while owed := self._checkpoints.owed():
            self._send_checkpoint(owed[0])
            self._files.send(logs=True)
            self._note_events()
        self._checkpoints.prune()
        self._journal.send()
        self._is_due, self._last = False, time.monotonic()

    def _send_checkpoint(self, path: Path) -> None:
        began = time.perf_counter()
        sent = self._checkpoints.send(path, self._journal)
        if sent is None:
            return
        skipped = [step for step in self._saved if self._checkpoints.lacks(step)]
        self._saved = [step for step in self._saved if step not in {sent.step, *skipped}]
        values = {
            "path": f"{self._claim.place.url}/checkpoints/{path.name}",
            "bytes": sent.bytes,
            "seconds": time.perf_counter() - began,
            "skipped": skipped,
        }
        append_event(self._run.journal, Event("uploaded", sent.step, values))

    def _note_answer(self) -> None:
        if self._failing is None:
            return
        seconds = show_seconds(time.monotonic() - self._failing)
        if self._warned:
            self._warn(f"{self._claim.place.url} answers again, after {seconds}")
        self._failing, self._pause, self._warned = None, _PAUSES[0], 0.0

    def _note_failure(self, error: StorageError | OSError) -> None:
        now = time.monotonic()
        self._failing = self._failing or now
        if isinstance(error, StorageError):
            self._cause, remedy = error.cause, error.remedy
        else:
            self._cause, remedy = explain_os_error(error, Path(error.filename or self._run.home))
        patience = self._claim.patience
        if patience and now - self._failing > patience:
            seconds = show_seconds(now - self._failing)
            self._give_up(self._owing(f"the store failed for {seconds} (track.store_patience)"))
        elif not self._warned or now - self._warned > _WARN_AGAIN:
            limit = f", for {show_seconds(patience)} at most" if patience else ""
            self._warn(f"{self._cause}: {remedy}. It is tried again{limit}, and training goes on")
            self._warned = now

    def _rest(self) -> None:
        if self._failing is None:
            self._ended.wait(_LOOK)
            return
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _PAUSES[1])

    def _owing(self, why: str) -> RunError:
        newest = self._checkpoints.newest
        return RunError(
            f"{self._claim.place.url} lacks a part of this run: {why}"
            + (f"; {self._cause}" if self._cause else "")
            + f". Its newest checkpoint there: {newest or 'none'}",
            f"{self._run.home} has everything: the same command, in this directory of this machine,"
            " sends the rest and goes on",
        )

    def _give_up(self, failure: RunError) -> None:
        if self.failure is None:
            self.failure = failure
            with suppress(OSError):
                self._stop()

    def _warn(self, text: str) -> None:
        record_beside(self._run.journal, self._run.logs, "warned", text=text)
