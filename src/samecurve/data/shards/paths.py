"""The files that shards are read from, and their kind."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.errors import UserError
from samecurve.storage.url import is_url

if TYPE_CHECKING:  # most shards are files
    from samecurve.storage.object_cache import StoredFile

KINDS = {  # by suffix
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tar": "tar",
}
_UNPACK = {
    ".gz": "gunzip --keep",
    ".tgz": "gunzip --keep",
    ".zst": "unzstd",
    ".bz2": "bunzip2 --keep",
    ".xz": "unxz --keep",
}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
Paths = str | Path | Sequence[str | Path]


def find_files(paths: Paths) -> "list[Path | StoredFile]":
    """The files of all paths and globs, each once, in the order of the paths.

    The matches of a glob are sorted. `shard-{0000..0017}.tar` is a range, as in webdataset.
    `s3://bucket/name` is an object, or a glob of objects. UserError: a path or glob has no file.
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    names = [one for path in several for one in expand_ranges(str(path))]
    files: list[Path | StoredFile] = []
    listing = None
    for name in names:
        if not is_url(name):
            files += _files_at(name)
            continue
        from samecurve.storage.object_cache import Listing

        listing = listing or Listing("data")
        files += listing.find(name)
    if not files:
        raise UserError("samecurve.Shards was given no path", "a path, a glob, or a list", "data")
    resolved = (file.resolve() if isinstance(file, Path) else file for file in files)
    return list(dict.fromkeys(resolved))


def kind_of(files: "Sequence[Path | StoredFile]") -> str:
    """The kind of these files. UserError: some are compressed, of different or unknown kinds."""
    by_kind: dict[str, Path | StoredFile] = {}
    for file in files:
        suffix = file.suffix.lower()
        if suffix in _UNPACK:
            raise UserError(
                f"{file} is compressed: it can't be read from the middle",
                f"{_UNPACK[suffix]} {file.name}, and name the file that this makes (images inside a"
                " tar may stay compressed)",
                "data",
            )
        if suffix not in KINDS:
            raise UserError(
                f"{file}: no kind of shard ends in {suffix or 'nothing'}",
                f"shards end in {', '.join(KINDS)}",
                "data",
            )
        by_kind.setdefault(KINDS[suffix], file)
    if len(by_kind) > 1:
        named = " and ".join(f"{kind} ({file.name})" for kind, file in by_kind.items())
        raise UserError(
            f"shards of more than one kind: {named}",
            "one samecurve.Shards for each kind, or a narrower glob",
            "data",
        )
    return next(iter(by_kind))


def expand_ranges(path: str) -> list[str]:
    """The paths of a text with ranges: `a-{08..10}` -> a-08, a-09, a-10."""
    match = _RANGE.search(path)
    if match is None:
        return [path]
    first, last = match.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    replaced = (f"{path[: match.start()]}{number}{path[match.end() :]}" for number in numbers)
    return [one for each in replaced for one in expand_ranges(each)]


def _files_at(path: str) -> list[Path]:
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.is_dir():
        raise UserError(f"{path} is a directory", f"a glob: {path.rstrip('/')}/*.jsonl", "data")
    matches = sorted(Path(match) for match in glob.glob(str(file), recursive=True))
    files = [match for match in matches if match.is_file()]
    if not files:
        raise UserError(
            f"samecurve.Shards: {path}: no such file or match; this is {Path.cwd()}",
            "a path or a glob, from the directory in which samecurve is started",
            "data",
        )
    return files
