"""What a store has of a run directory's files and checkpoints, and what is still to be sent."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samecurve.checkpoint import MANIFEST, CorruptCheckpointError, name_of, read_manifest
from samecurve.checkpoint.store import best_first, checkpoints, hold
from samecurve.core.planning.plan import Plan
from samecurve.core.system import regular_only
from samecurve.run.directory import Run
from samecurve.run.remote.journal_parts import JournalParts
from samecurve.run.remote.stored_run import (
    CHECKPOINTS,
    OWN_FILES,
    VOID,
    StoredRun,
    missing_bytes,
    read_manifests,
)
from samecurve.storage.place import Place

_MOST_LOG = 4 << 20  # bytes of a log that are sent: its end


@dataclass(frozen=True)
class Sent:
    """A checkpoint that was uploaded."""

    step: int
    bytes: int


class Checkpoints:
    """The whole checkpoints in the store, by the hashes of their manifests.

    shadow: a directory for copies of their manifests
    """

    def __init__(self, place: Place, run: Run, plan: Plan, shadow: Path) -> None:
        self._place, self._run, self._plan, self._shadow = place, run, plan, shadow
        self._whole: dict[str, str] = {}
        self._parts_sent: set[tuple[str, str]] = set()  # hash of a manifest, file

    def compare(self, stored: StoredRun) -> None:
        """Take up what the store has; remove what an upload left that was cut off."""
        names = stored.checkpoint_names()
        for home in read_manifests(self._place, names, self._shadow):
            manifest = read_manifest(home)
            if not missing_bytes(manifest, stored.files_of(home.name)):
                self._whole[home.name] = manifest["hash"]
        for name in sorted(stored.objects):
            folder, _, rest = name.removeprefix(f"{CHECKPOINTS}/").partition("/")
            is_of_none = name.startswith(f"{CHECKPOINTS}/") and rest and folder not in names
            if is_of_none and VOID not in stored.files_of(folder):
                self._place.remove([name])

    def lacks(self, step: int) -> bool:
        """Whether the store will never have a step's checkpoint: the directory has let it go."""
        name = name_of(step)
        return name not in self._whole and not (self._run.checkpoints / name).exists()

    @property
    def newest(self) -> str | None:
        return max(self._whole, default=None)

    def owed(self) -> list[Path]:
        """Checkpoints that the store lacks: the newest, the best of all, then others to keep."""
        here = {path.name: path for path in checkpoints(self._run.checkpoints) if _hash(path)}
        there = [self._shadow / name for name in self._whole if name not in here]
        best = best_first([*here.values(), *there], self._plan.best)[:1]
        kept = sorted({*here, *self._whole}, reverse=True)[: self._plan.keep or None]
        wanted = [*kept[:1], *(path.name for path in best), *kept]
        return [
            here[name]
            for name in dict.fromkeys(wanted)
            if name in here and self._whole.get(name) != _hash(here[name])
        ]

    def send(self, path: Path, journal: JournalParts) -> Sent | None:
        """Upload a checkpoint: its files, the journal, the manifest. None: it is gone meanwhile."""
        name, under = path.name, f"{CHECKPOINTS}/{path.name}"
        try:
            with hold(path):
                manifest = read_manifest(path)
                if name in self._whole:  # another one of this step, which was trained anew
                    self._place.remove([f"{under}/{MANIFEST}"])
                    del self._whole[name]
                for file in manifest["files"]:
                    if (manifest["hash"], file) not in self._parts_sent:
                        self._place.upload(f"{under}/{file}", path / file)
                        self._parts_sent.add((manifest["hash"], file))
                journal.send()
                content = (path / MANIFEST).read_bytes()
                self._place.write(f"{under}/{MANIFEST}", content)
        except (FileNotFoundError, CorruptCheckpointError):
            if path.is_dir():
                raise
            return None
        self._parts_sent.clear()
        (self._shadow / name).mkdir(parents=True, exist_ok=True)
        (self._shadow / name / MANIFEST).write_bytes(content)
        self._whole[name] = manifest["hash"]
        sizes = (entry["bytes"] for entry in manifest["files"].values())
        return Sent(manifest["step"], sum(sizes))

    def prune(self) -> None:
        """Remove old checkpoints from the store by the rule of the run directory."""
        keep = self._plan.keep
        if not keep:
            return
        paths = [self._shadow / name for name in sorted(self._whole, reverse=True)]
        best = best_first(paths, self._plan.best)[:1]
        for path in paths[keep:]:
            if path not in best:
                self._remove(path.name)

    def void_after(self, step: int) -> None:
        """Have checkpoints beyond a step be none any more: their steps are trained anew.

        Their files stay, and their manifest under another name, for their owner to look at.
        """
        for name in [name for name in self._whole if name > name_of(step)]:
            under = f"{CHECKPOINTS}/{name}"
            self._place.write(f"{under}/{VOID}", (self._shadow / name / MANIFEST).read_bytes())
            self._place.remove([f"{under}/{MANIFEST}"])
            del self._whole[name]

    def _remove(self, name: str) -> None:
        under = f"{CHECKPOINTS}/{name}/"
        del self._whole[name]
        self._place.remove([f"{under}{MANIFEST}"])
        self._place.remove(self._place.list(under))


class Files:
    """All other files of a run directory. What has not changed is sent once."""

    def __init__(self, place: Place, run: Run) -> None:
        self._place, self._run = place, run
        self._sent: dict[str, tuple[int, int]] = {}  # name -> size and time of the last change

    def compare(self, stored: StoredRun) -> None:
        """Take up large files that never change: the weights that the run began from."""
        for name, path in self._names(logs=False):
            there, status = stored.objects.get(name), path.stat()
            if path.is_relative_to(self._run.initial) and there and there.size == status.st_size:
                self._sent[name] = status.st_size, status.st_mtime_ns

    def send(self, *, logs: bool) -> None:
        """Send what has changed. logs: those of the ranks too"""
        names = sorted(self._names(logs=logs), key=lambda item: item[0] == "plan.json")
        for name, path in names:
            try:
                status = path.stat()
                stamp = status.st_size, status.st_mtime_ns
                if self._sent.get(name) == stamp:
                    continue
                if path.parent == self._run.logs:
                    self._place.write(name, _end_of(path))
                else:
                    self._place.upload(name, path)
                self._sent[name] = stamp
            except FileNotFoundError:  # it was removed meanwhile
                continue

    def _names(self, *, logs: bool) -> Iterator[tuple[str, Path]]:
        home = self._run.home
        for folder, folders, files in os.walk(home):
            here = Path(folder)
            folders[:] = [name for name in folders if not name.startswith((".", "void-"))]
            if here == home:
                folders[:] = [name for name in folders if name != CHECKPOINTS]
            if here == self._run.logs:
                folders.clear()  # trackers' own files
            for name in files:
                path = here / name
                if _is_kept(name, in_logs=here == self._run.logs, logs=logs) and not (
                    here == home and name in OWN_FILES
                ):
                    yield path.relative_to(home).as_posix(), path


def _is_kept(name: str, *, in_logs: bool, logs: bool) -> bool:
    if name.startswith(".") or name.endswith(".part"):
        return False
    return not in_logs or (logs and name.endswith(".log"))


def _end_of(path: Path) -> bytes:
    """The last bytes of a log."""
    with open(path, "rb", opener=regular_only) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST_LOG))
        return file.read(_MOST_LOG)


def _hash(path: Path) -> str | None:
    """The hash of a checkpoint's manifest; None: it is damaged, or gone."""
    try:
        return str(read_manifest(path)["hash"])
    except (CorruptCheckpointError, OSError):
        return None
