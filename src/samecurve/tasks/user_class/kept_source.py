"""A run's own copy of the source of a user's class: `RUN/source/`, with an index of the files.

With the copy a run's model can be used on any later day, from any directory, whatever has become of
the files that it was trained with. Files on disk stay readable without it.
"""

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from samecurve.core.config.document import Document
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.core.system import read_file_bytes, write_json
from samecurve.tasks.user_class import (
    SOURCE_INDEX,
    SOURCES,
    Place,
    is_pickled,
    place_of,
)
from samecurve.tasks.user_class.local_imports import LocalFiles, local_files, tree_of
from samecurve.tasks.user_class.pickled_class import is_remembered, remember

_MOST_FILES, _MOST_BYTES = 400, 8 << 20  # of a copy
_MOST_INDEX = 1 << 20  # bytes


@dataclass(frozen=True)
class KeptSource:
    """The copy of a class's source in a run."""

    home: Path  # the directory of the copy
    task: str  # the config's value: path/to/file.py:MyTask, or package.module:MyTask
    root: str  # where the files lay
    entry: str  # the class's own file, relative to the root
    module: str | None  # the module's name, if the class is imported by name
    files: dict[str, str]  # relative path -> SHA-256 of the content

    @property
    def kept_task(self) -> str:
        """The config value that names the class in the copy."""
        return f"{(self.home / self.entry).resolve()}:{self.task.rpartition(':')[2]}"

    def original(self) -> Place | None:
        """The class in the files that were copied; None: its module can't be found."""
        if self.module:
            return place_of(self.task)
        return Place(Path(self.root, self.entry), self.task.rpartition(":")[2])

    def changes(self, place: Place) -> list[str]:
        """The files of `place` that say something else than the copy; comments don't count."""
        try:
            now = local_files(place).sources
        except (OSError, ValueError):
            return [self.entry]
        before = {name: (self.home / name).read_bytes() for name in self.files}
        return sorted(
            name
            for name in {*now, *before}
            if now.get(name) != before.get(name)
            and (
                name not in now or name not in before or tree_of(now[name]) != tree_of(before[name])
            )
        )

    def is_own(self) -> bool:
        """Whether a session of this user made the copy, and nobody has changed it."""
        return is_remembered(self.home / SOURCE_INDEX) and all(
            hashlib.sha256((self.home / name).read_bytes()).hexdigest() == digest
            for name, digest in self.files.items()
        )


def read_kept_source(run: Path) -> KeptSource | None:
    """The copy in a run's directory, which may come from anywhere; None: there is none, or it is
    not whole.
    """
    home = run / SOURCES
    try:
        values = json.loads(read_file_bytes(home / SOURCE_INDEX, _MOST_INDEX))
        kept = parse_dataclass(KeptSource, {**values, "home": home})
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_whole = (
        kept.entry in kept.files
        and len(kept.files) <= _MOST_FILES
        and all(_is_inside(home, name) for name in kept.files)
    )
    return kept if is_whole else None


def keep_source(run: Path, task: str, *, step: int) -> str | None:
    """Copy the source of the config's class into a run's directory.

    step: of the checkpoint that the run goes on from: a copy of other code that is there already
        is kept as `source-until-step-N`

    Returns a line for the user, if the source can't be kept.
    """
    place = place_of(task)
    if place is None or is_pickled(place.path):
        return None
    local = local_files(place)
    size = sum(map(len, local.sources.values()))
    if len(local.sources) > _MOST_FILES or size > _MOST_BYTES:
        return (
            f"{place.path} and the modules beside it that it imports are {len(local.sources)} files"
            f" of {size >> 20} MiB, too many to be kept in the run: its model can be used as long"
            " as these files stay as they are"
        )
    before = read_kept_source(run)
    if before is None or before.task != task or before.changes(place):
        _write(run, task, place, local, step=step)
    return None


def used_document(run: Path, document: Document) -> None:
    """Point a run's config to the copy of its class, where the files themselves have changed."""
    kept = read_kept_source(run)
    if kept is None or document.value.get("task") != kept.task:
        return
    original = kept.original()
    if original is None or kept.changes(original):
        document.value["task"] = kept.kept_task
    elif not kept.module and Path(kept.task.rpartition(":")[0]).resolve() != original.path:
        document.value["task"] = f"{original.path}:{original.name}"


def _write(run: Path, task: str, place: Place, local: LocalFiles, *, step: int) -> None:
    home = run / SOURCES
    scratch = run / f"{SOURCES}.part"
    for name, content in local.sources.items():
        file = scratch / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in local.sources.items()}
    kept = KeptSource(
        home=scratch,
        task=task,
        root=str(local.root),
        entry=local.entry,
        module=place.module,
        files=digests,
    )
    values = asdict(kept)
    del values["home"]
    write_json(scratch / SOURCE_INDEX, values)
    remember(scratch / SOURCE_INDEX)
    if home.exists():
        home.rename(place_of_older(run, step))
    scratch.rename(home)


def place_of_older(run: Path, step: int) -> Path:
    """Where a run keeps the source with which it was trained until this step."""
    aside, number = run / f"{SOURCES}-until-step-{step}", 1
    while aside.exists():
        number += 1
        aside = run / f"{SOURCES}-until-step-{step}-{number}"
    return aside


def _is_inside(home: Path, name: str) -> bool:
    """Whether a name is of an ordinary source in the copy, reached through no link."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        return False
    steps = [home.joinpath(*path.parts[:length]) for length in range(len(path.parts) + 1)]
    return not any(step.is_symlink() for step in steps) and stat.S_ISREG(
        (home / name).lstat().st_mode if (home / name).exists() else 0
    )
