"""A run in a store: which objects it has, and which of its checkpoints are whole.

    config.yaml plan.json results.json assets/ samples/ logs/    as in the run directory
    journal/000000000000.jsonl  000000262301.jsonl               the journal, cut between lines
    checkpoints/step-00000500/rank-0-of-2.safetensors ...  manifest.json
    lease.json

A part of the journal is named by the byte of the journal at which it begins. A checkpoint whose
manifest is absent is none: its manifest is written last and removed first.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.checkpoint import (
    MANIFEST,
    CorruptCheckpointError,
    is_step_name,
    read_manifest,
)
from samecurve.core.system import read_file_bytes, write_json, write_whole
from samecurve.run.directory import Run
from samecurve.storage.failures import StorageError
from samecurve.storage.place import Place, StoredObject
from samecurve.storage.url import ObjectUrl

CHECKPOINTS, JOURNAL = "checkpoints", "journal"
VOID = f"void-{MANIFEST}"  # the manifest of a checkpoint that must not be gone on from
LEASE = "lease.json"
_PART = re.compile(rf"{JOURNAL}/(\d{{12}})\.jsonl")
OWN_FILES = frozenset(
    {"lock", "control.jsonl", "journal.jsonl", "remote.json", LEASE}
)  # of one copy
_MOST = 1 << 16  # bytes of remote.json


@dataclass(frozen=True)
class Mirrored:
    """What remote.json says of a run directory."""

    url: str
    copy: str

    @classmethod
    def of(cls, run: Run) -> "Mirrored | None":
        try:
            content = json.loads(read_file_bytes(run.remote, _MOST))
            return cls(str(content["url"]), str(content["copy"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, run: Run) -> None:
        write_json(run.remote, {"url": self.url, "copy": self.copy})


def note_unmirrored(run: Run) -> list[str]:
    """The line about a run that goes on without its mirror; [] where it has none."""
    mirrored = Mirrored.of(run)
    if mirrored is None:
        return []
    return [
        f"this run is mirrored to {mirrored.url}, which gets nothing of this start: --save-dir"
        f" {mirrored.url} in place of {run.home} goes on with both"
    ]


def part_name(begin: int) -> str:
    """The name of the part of the journal that begins at this byte."""
    return f"{JOURNAL}/{begin:012}.jsonl"


class StoredRun:
    """The objects of a run, as they are listed once."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.objects = place.list()

    @property
    def url(self) -> ObjectUrl:
        return self.place.url

    def exists(self) -> bool:
        return "plan.json" in self.objects

    def checkpoint_names(self) -> list[str]:
        """The names of checkpoints that have a manifest, newest first."""
        names = {
            name.split("/")[1]
            for name in self.objects
            if re.fullmatch(rf"{CHECKPOINTS}/[^/]+/{MANIFEST}", name)
        }
        return sorted(filter(is_step_name, names), reverse=True)

    def files_of(self, checkpoint: str) -> dict[str, StoredObject]:
        """The objects of a checkpoint, by file."""
        under = f"{CHECKPOINTS}/{checkpoint}/"
        return {
            name.removeprefix(under): stored
            for name, stored in self.objects.items()
            if name.startswith(under)
        }

    def journal_parts(self) -> Iterator[tuple[int, StoredObject]]:
        """The parts of the journal without a gap, each with the byte at which it begins."""
        end = 0
        for name in sorted(self.objects):
            part = _PART.fullmatch(name)
            if part and int(part[1]) == end:
                yield end, self.objects[name]
                end += self.objects[name].size

    def plain_files(self) -> dict[str, StoredObject]:
        """All other files of the run."""
        beside = (f"{CHECKPOINTS}/", f"{JOURNAL}/")
        return {
            name: stored
            for name, stored in self.objects.items()
            if not name.startswith(beside) and name not in OWN_FILES and _is_inside(name)
        }


def read_manifests(place: Place, names: list[str], into: Path) -> list[Path]:
    """Bring the manifests of checkpoints into directories without arrays, for best_first().

    One that is gone, or can't be read, is left out.
    """
    paths = []
    for name in names:
        home = into / name
        if not (home / MANIFEST).is_file():
            try:
                content = place.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")
            except StorageError as error:
                if error.kind != "missing":
                    raise
                continue
            home.mkdir(parents=True, exist_ok=True)
            write_whole(home / MANIFEST, content)
        try:
            read_manifest(home)
        except CorruptCheckpointError:
            continue
        paths.append(home)
    return paths


def missing_bytes(manifest: Mapping[str, Any], files: Mapping[str, StoredObject]) -> str:
    """What a checkpoint in the store lacks by its manifest; '': nothing."""
    for name, expected in manifest["files"].items():
        if name not in files:
            return f"{name} is missing"
        if files[name].size != expected["bytes"]:
            return f"{name} has {files[name].size} bytes, not {expected['bytes']}"
    return ""


def _is_inside(name: str) -> bool:
    """Whether a name, as a path, stays in the directory that it is brought to."""
    return all(part not in {"", ".", ".."} for part in name.split("/")) and "\\" not in name
