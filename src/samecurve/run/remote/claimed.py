"""The start of a run whose --save-dir is in a store: the lease, and the local directory.

A run trains in a local directory, which is mirrored to the store. The directory of a URL is found
again by its name, so the same command goes on with it. Where it is missing, or another machine has
gone on since, the run is brought from the store.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from samecurve.checkpoint.store import checkpoints
from samecurve.errors import UserError
from samecurve.run.directory import Run, is_live
from samecurve.run.remote.fetch import fetch_checkpoint, fetch_run
from samecurve.run.remote.lease import Lease, claim
from samecurve.run.remote.stored_run import Mirrored, StoredRun
from samecurve.storage.place import Place, open_place
from samecurve.storage.url import ObjectUrl, run_home
from samecurve.terminal import echo

WHERE = "--save-dir"


@dataclass
class Claim:
    """A place in a store that this process may write, and the directory that it trains in."""

    place: Place
    home: Path
    mirrored: Mirrored
    lease: Lease
    is_new: bool  # nothing was there
    patience: float = 0.0  # seconds for which the store may fail; 0: as long as it takes
    notes: list[str] = field(default_factory=list)

    def release(self) -> None:
        self.lease.release(forget=self.is_new)


@contextmanager
def claimed(url: ObjectUrl, patience: float) -> Iterator[Claim]:
    """Claim a place and bring what it has. If the block fails, the claim is released.

    UserError: another run lives there, or the store refuses. StorageError: it can't be reached.
    """
    place = open_place(url, WHERE)
    home = run_home(url)
    run = Run(home)
    if home.is_dir() and is_live(run):
        raise UserError(
            f"{url} belongs to a live run of this machine, in {home}",
            "wait for it, stop it, or give another --save-dir",
            WHERE,
        )
    before = Mirrored.of(run)
    copy = before.copy if before and before.url == str(url) else token_hex(8)
    claim_of = Claim(place, home, Mirrored(str(url), copy), claim(place, copy, WHERE), is_new=True)
    claim_of.patience = patience
    try:
        _bring(claim_of, run)
        yield claim_of
    except BaseException:
        claim_of.release()
        raise


def _bring(claim_of: Claim, run: Run) -> None:
    """Make the local directory the newest state of the run, if there is one."""
    stored = StoredRun(claim_of.place)
    claim_of.is_new = not stored.exists()
    url, home = claim_of.place.url, claim_of.home
    holder = claim_of.lease.before
    is_own = Mirrored.of(run) == claim_of.mirrored
    if run.exists() and is_own and (not stored.exists() or not _went_on_elsewhere(claim_of)):
        echo(f"store  {url} is the mirror of {home}", err=True)
        _bring_newer(claim_of, stored, run)
        return
    if run.exists() and not is_own and not stored.exists():
        raise UserError(
            f"{home} holds a run that is not mirrored to {url}", "rename that directory", WHERE
        )
    if not stored.exists():
        echo(f"store  a new run: {url} is the mirror of {home}", err=True)
        return
    if home.exists():
        aside = home.with_name(f"{home.name}.stale-{time.time_ns():x}")
        home.rename(aside)
        host = holder.host if holder else "another machine"
        claim_of.notes.append(
            f"{url} went on elsewhere ({host}) since {home} was trained here: that directory is set"
            f" aside as {aside.name}"
        )
    fetched = fetch_run(stored, home)
    claim_of.mirrored.write(run)
    claim_of.notes += fetched.notes
    what = fetched.checkpoint or "no checkpoint yet"
    echo(f"store  {url} ({what}) was brought to {home}, its mirror from now on", err=True)


def _went_on_elsewhere(claim_of: Claim) -> bool:
    """Whether another directory than this one was mirrored last."""
    before = claim_of.lease.before
    return before is not None and before.copy != claim_of.mirrored.copy


def _bring_newer(claim_of: Claim, stored: StoredRun, run: Run) -> None:
    """Bring the store's newest checkpoint where this directory has lost it."""
    here = [path.name for path in checkpoints(run.checkpoints)]
    newer = [name for name in stored.checkpoint_names() if not here or name > here[0]]
    if newer:
        run.checkpoints.mkdir(exist_ok=True)
        fetched = fetch_checkpoint(stored, run.checkpoints, newer)
        claim_of.notes += fetched.notes
        if fetched.checkpoint:
            claim_of.notes.append(
                f"{fetched.checkpoint} was missing in {run.checkpoints}: brought from {stored.url}"
            )
