"""Bring a run from a store to this machine: its files, its journal, and a checkpoint.

A checkpoint is checked against its manifest here, file by file, before anything uses it. That needs
every byte of its files, so whole files are brought, several ranges at once, and once for all ranks
of this machine.
"""

from dataclasses import dataclass, field
from pathlib import Path

from samecurve.checkpoint import MANIFEST, CorruptCheckpointError, name_of, read_manifest
from samecurve.checkpoint.format import verify_checkpoint
from samecurve.checkpoint.store import best_first
from samecurve.core.planning.plan import Plan
from samecurve.core.system import directory_made_once
from samecurve.errors import UserError
from samecurve.run.remote.stored_run import (
    CHECKPOINTS,
    JOURNAL,
    StoredRun,
    missing_bytes,
    read_manifests,
)
from samecurve.storage.failures import StorageError
from samecurve.terminal import echo
from samecurve.units import show_bytes


@dataclass
class Fetched:
    """A run that was brought. checkpoint: its name; None: the store has none."""

    checkpoint: str | None = None
    notes: list[str] = field(default_factory=list)  # about broken checkpoints that were passed over


def fetch_run(stored: StoredRun, home: Path) -> Fetched:
    """Bring a whole run with its newest whole checkpoint into a new directory, at once or not at
    all.

    UserError: all checkpoints in the store are broken.
    """
    with directory_made_once(home) as scratch:
        fetch_files(stored, scratch)
        (scratch / CHECKPOINTS).mkdir(exist_ok=True)
        fetched = fetch_checkpoint(stored, scratch / CHECKPOINTS)
        if fetched.checkpoint is None and fetched.notes:
            raise UserError(
                f"{stored.url} has no whole checkpoint to go on from: {'; '.join(fetched.notes)}",
                "another --save-dir, which begins anew; or a copy of the checkpoint in its place",
                "--save-dir",
            )
    return fetched


def fetch_files(stored: StoredRun, home: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Bring all of a run but its checkpoints. plan.json comes last: without it there is no run.

    leave_out: what the names of other files begin with
    """
    files = sorted(stored.plain_files().items(), key=lambda item: item[0] == "plan.json")
    with open(home / "journal.part", "wb") as journal:
        for _, part in stored.journal_parts():
            journal.write(stored.place.read(part.name))
    (home / "journal.part").replace(home / f"{JOURNAL}.jsonl")
    for name, there in files:
        target = home / name
        if leave_out and name.startswith(leave_out):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.part")
        stored.place.download(name, there.size, scratch)
        scratch.replace(target)


def fetch_checkpoint(stored: StoredRun, into: Path, only: list[str] | None = None) -> Fetched:
    """Bring the newest whole checkpoint. only: the names to look at, in this order; None: all"""
    fetched = Fetched()
    for name in stored.checkpoint_names() if only is None else only:
        if (into / name).is_dir():
            fetched.checkpoint = name
            break
        try:
            _fetch(stored, name, into)
            fetched.checkpoint = name
            break
        except CorruptCheckpointError as error:
            fetched.notes.append(f"checkpoint {name} in {stored.url} is broken: {error}")
    if fetched.checkpoint and fetched.notes:
        fetched.notes = [f"{line}; going on from {fetched.checkpoint}" for line in fetched.notes]
    return fetched


def best_name(stored: StoredRun, plan: Plan, scratch: Path) -> str | None:
    """The name of the checkpoint in the store whose evaluation was the best; None: none was."""
    paths = read_manifests(stored.place, stored.checkpoint_names(), scratch)
    return next((path.name for path in best_first(paths, plan.best)), None)


def _fetch(stored: StoredRun, name: str, into: Path) -> None:
    """Bring one checkpoint, whole or not at all. CorruptCheckpointError: it is broken, or gone."""
    files = stored.files_of(name)
    try:
        with directory_made_once(into / name) as scratch:
            stored.place.download(files[MANIFEST].name, files[MANIFEST].size, scratch / MANIFEST)
            manifest = read_manifest(scratch)
            wrong = missing_bytes(manifest, files)
            if wrong:
                raise CorruptCheckpointError(wrong)
            size = sum(entry["bytes"] for entry in manifest["files"].values())
            echo(f"store  {name}: fetching {show_bytes(size)} from {stored.url}", err=True)
            for file in manifest["files"]:
                stored.place.download(files[file].name, files[file].size, scratch / file)
            if name_of(verify_checkpoint(scratch)["step"]) != name:
                raise CorruptCheckpointError(f"its manifest is of step {manifest['step']}")
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise CorruptCheckpointError("it was removed while it was read") from None
